"""The gated delta rule, in plain torch and in Triton, against a loop over tokens in float64.

`test_delta.py` runs the Triton kernels in the interpreter, `tests/gpu/test_kernels.py` calls them on a GPU.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from engine.kernels import delta
from engine.kernels.delta import DeltaHeads
from engine.model.layers.delta import delta_heads
from engine.spec.states import DeltaSpec
from tests.unit.kernels.state_passes import NUM_BLOCKS, TOLERANCES, Sequence, StatePass, close, passes
from tests.unit.kernels.triton_checks import poisoned

SPECS = {
    "small": DeltaSpec(num_key_heads=2, num_value_heads=2, key_dim=16, value_dim=16, taps=4),
    "together": DeltaSpec(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=24, taps=3, stored="by_group"),
    "odd": DeltaSpec(num_key_heads=2, num_value_heads=2, key_dim=20, value_dim=40, taps=2, most_strength=2.0),
    "large": DeltaSpec(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, taps=4, stored="by_group"),
}
BLOCK_SIZES = {"small": 16, "together": 8, "odd": 64, "large": 1024}


def run(name: str, device: str) -> None:
    spec, block_size = SPECS[name], BLOCK_SIZES[name]
    heads = delta_heads(spec)
    dtypes = {"cpu": [torch.float32 if name == "small" else torch.float16]}.get(device, list(TOLERANCES))
    for dtype in dtypes:
        for each in passes(block_size, device):
            _check(heads, each, dtype, device)


def interpret(name: str) -> None:
    run(name, "cpu")


def _check(heads: DeltaHeads, of: StatePass, dtype: torch.dtype, device: str) -> None:
    batch, sequences = of.batch, of.sequences
    num_channels = heads.channels.count
    num_columns = 2 * num_channels
    x = torch.randn(of.num_rows, num_columns, device=device).to(dtype)
    weight = (torch.randn(num_channels, heads.taps, device=device) * 0.5).to(dtype)
    decay, bias = torch.randn(2, heads.num_value_heads, device=device)
    pool = torch.randn(NUM_BLOCKS, 3, heads.num_value_heads * heads.key_dim * heads.value_dim, device=device)
    states = pool[:, 1:2].view(NUM_BLOCKS, 1, 1, heads.num_value_heads, -1)
    inputs = torch.randn(NUM_BLOCKS, heads.taps + 1, num_channels, device=device).to(dtype)
    kept = inputs[:, 1 : heads.taps, None, None]
    before = pool.double().clone(), inputs.double().clone()
    expected = [_expected(of, each, x, weight, decay, bias, *before, heads) for each in sequences]
    with poisoned():
        mixed = delta.convolve(x, weight, None, kept, batch, heads.channels)
        out = delta.delta_rule(mixed, x, decay, bias, states, batch, heads)
    untouched = set(range(NUM_BLOCKS))
    for each, (wanted_mixed, wanted_out, states_behind, inputs_behind) in zip(sequences, expected, strict=True):
        rows = slice(each.row, each.row + each.count)
        close(mixed[rows], wanted_mixed, dtype)
        close(out[rows], wanted_out, dtype)
        for block, state in states_behind.items():
            untouched.discard(block)
            close(pool[block, 1].view_as(state), state, dtype)
            close(kept[block, :, 0, 0], inputs_behind[block], dtype)
    rest = sorted(untouched)
    assert torch.equal(pool[rest].double(), before[0][rest])
    assert torch.equal(inputs[rest].double(), before[1][rest])
    assert torch.equal(pool[:, [0, 2]].double(), before[0][:, [0, 2]])
    norm = torch.randn(heads.value_dim, device=device).to(dtype)
    plain = torch.randn(of.num_rows, heads.num_value_heads, heads.value_dim, device=device).to(dtype)
    z = heads.view(x, heads.z, heads.ratio * heads.value_dim).double().reshape(plain.shape)
    wide = plain.double()
    wanted = norm.double() * wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * z * z.sigmoid()
    close(delta.gated_norm(plain, x, norm, 1e-6, heads).view_as(wanted), wanted, dtype)


def _expected(
    of: StatePass,
    sequence: Sequence,
    x: torch.Tensor,
    weight: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    pool: torch.Tensor,
    inputs: torch.Tensor,
    heads: DeltaHeads,
) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """The convolution's and the rule's outputs, then each written block's state and last inputs."""
    start, count, ratio = sequence.start, sequence.count, heads.ratio
    rows = x[sequence.row : sequence.row + count].double()
    widths = (heads.key_dim, heads.key_dim, ratio * heads.value_dim)
    columns = zip((heads.q, heads.k, heads.v), widths, strict=True)
    new = torch.cat([heads.view(rows, *each).flatten(1) for each in columns], dim=1)
    shape = (heads.num_value_heads, heads.key_dim, heads.value_dim)
    state, known = new.new_zeros(shape), new.new_zeros(heads.taps - 1, heads.channels.count)
    if start:
        block = of.place(sequence, start - 1)
        state, known = pool[block, 1].view(shape), inputs[block, 1 : heads.taps]
    known = torch.cat((known, new))
    mixed = torch.stack([(known[at : at + heads.taps] * weight.double().T).sum(0) for at in range(count)])
    mixed = mixed * mixed.sigmoid()
    rounded = mixed.to(x.dtype).double()
    q, k, v = rounded.split((heads.keys_size, heads.keys_size, heads.values_size), dim=1)
    q, k = (part.unflatten(1, (-1, heads.key_dim)).repeat_interleave(ratio, dim=1) for part in (q, k))
    q, k = (part / (part.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    v = v.unflatten(1, (-1, heads.value_dim))
    beta = heads.most_strength * heads.view(rows, heads.b, ratio).flatten(1).sigmoid()
    g = -decay.double().exp() * softplus(heads.view(rows, heads.a, ratio).flatten(1) + bias.double())
    out, states, last = [], {}, {}
    for at in range(count):
        state = state * g[at].exp()[:, None, None]
        added = beta[at][:, None] * (v[at] - torch.einsum("hkv,hk->hv", state, k[at]))
        state = state + k[at][:, :, None] * added[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[at]) * heads.key_dim**-0.5)
        block = of.place(sequence, start + at)
        states[block], last[block] = state, known[at + 1 : at + heads.taps]
    return mixed, torch.stack(out), states, last
