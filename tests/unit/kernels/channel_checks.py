"""The delta rule with a decay for each channel, in plain torch and in Triton, against a loop over tokens in float64.

`test_delta.py` runs the Triton kernels in the interpreter, `tests/gpu/test_kernels.py` calls them on a GPU.
"""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from engine.kernels.delta import DeltaHeads, channel_delta_rule, gated_norm
from engine.model.layers.channel_delta import channel_heads
from engine.spec.states import ChannelDeltaSpec
from tests.unit.kernels.state_passes import NUM_BLOCKS, TOLERANCES, Sequence, StatePass, check_states, close, passes
from tests.unit.kernels.triton_checks import poisoned

SPECS = {
    "small": ChannelDeltaSpec(num_heads=2, head_dim=16, taps=4),
    "odd": ChannelDeltaSpec(num_heads=1, head_dim=20, taps=2),
    "tiles": ChannelDeltaSpec(num_heads=2, head_dim=24, taps=4),
    "large": ChannelDeltaSpec(num_heads=32, head_dim=128, taps=4),
}
# Prompts are cut into tiles at the ends of blocks, so only those of large ones are whole.
BLOCK_SIZES = {"small": 16, "odd": 8, "tiles": 1024, "large": 1024}
# Some channels forget all at once, others nearly nothing: what is computed must have no bound on either.
RANGE_OF_DECAYS = 4.0


def run(name: str, device: str) -> None:
    heads = channel_heads(SPECS[name])
    dtypes = {"cpu": [torch.float32 if name in ("small", "tiles") else torch.float16]}.get(device, list(TOLERANCES))
    for dtype in dtypes:
        for each in passes(BLOCK_SIZES[name], device):
            _check(heads, each, dtype, device)
        _check_gate(heads, dtype, device)


def interpret(name: str) -> None:
    run(name, "cpu")


def _check(heads: DeltaHeads, of: StatePass, dtype: torch.dtype, device: str) -> None:
    num, size = heads.num_value_heads, heads.keys_size
    x = torch.randn(of.num_rows, heads.b.first + num + 3, device=device).to(dtype)
    mixed = torch.randn(of.num_rows, 3 * size, device=device).to(dtype)
    decays = (RANGE_OF_DECAYS * torch.randn(of.num_rows, size, device=device)).to(dtype)
    decay, bias = torch.randn(num, device=device), torch.randn(size, device=device)
    pool = torch.randn(NUM_BLOCKS, 3, num * heads.key_dim * heads.value_dim, device=device)
    states, before = pool[:, 1:2].view(NUM_BLOCKS, 1, 1, num, -1), pool.clone()
    with poisoned():
        out = channel_delta_rule(mixed, x, decays, decay, bias, states, of.batch, heads)
    g = -decay.double().exp()[:, None] * softplus(decays.double() + bias.double()).unflatten(1, (num, -1))
    kept = before.double()
    check_states(of, out, pool, before, dtype, lambda sequence: _expected(sequence, of, mixed, x, g, kept, heads))


def _expected(
    sequence: Sequence,
    of: StatePass,
    mixed: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    pool: torch.Tensor,
    heads: DeltaHeads,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The outputs, and the state in each written place."""
    num, dim = heads.num_value_heads, heads.key_dim
    rows = slice(sequence.row, sequence.row + sequence.count)
    q, k, v = (part.unflatten(1, (num, dim)) for part in mixed[rows].double().chunk(3, dim=1))
    q, k = (part / (part.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta = x[rows, heads.b.first : heads.b.first + num].double().sigmoid()
    shape = (num, dim, dim)
    state = q.new_zeros(shape)
    if sequence.start:
        state = pool[of.place(sequence, sequence.start - 1), 1].view(shape)
    out, behind = [], {}
    for at in range(sequence.count):
        state = state * g[sequence.row + at].exp()[:, :, None]
        added = beta[at][:, None] * (v[at] - torch.einsum("hkv,hk->hv", state, k[at]))
        state = state + k[at][:, :, None] * added[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[at]) * dim**-0.5)
        behind[of.place(sequence, sequence.start + at)] = state
    return torch.stack(out), behind


def _check_gate(heads: DeltaHeads, dtype: torch.dtype, device: str) -> None:
    out, z = torch.randn(2, 3, heads.num_value_heads, heads.value_dim, device=device).to(dtype).unbind(0)
    weight, wide = torch.randn(heads.value_dim, device=device).to(dtype), out.double()
    wanted = weight.double() * wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * z.double().sigmoid()
    close(gated_norm(out, z.flatten(1), weight, 1e-5, heads, has_silu=False).view_as(wanted), wanted, dtype)
