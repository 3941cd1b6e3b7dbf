"""The gated delta rule, in plain torch and in Triton, against a loop over tokens in float64.

`test_delta.py` runs the Triton kernels in the interpreter, `tests/gpu/test_kernels.py` calls them on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import softplus

from engine.kernels import delta
from engine.kernels.delta import DeltaHeads, StateBatch, deal_out_states
from engine.model.layers.delta import delta_heads
from engine.model.spec import DeltaSpec
from tests.unit.kernels.triton_checks import poisoned

SPECS = {
    "small": DeltaSpec(num_key_heads=2, num_value_heads=2, key_dim=16, value_dim=16, taps=4),
    "together": DeltaSpec(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=24, taps=3, grouped=True),
    "odd": DeltaSpec(num_key_heads=2, num_value_heads=2, key_dim=20, value_dim=40, taps=2),
    "large": DeltaSpec(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, taps=4, grouped=True),
}
BLOCK_SIZES = {"small": 16, "together": 8, "odd": 64, "large": 1024}
# Of each sequence: tokens before and in the pass; those with one token decode.
PASSES = (
    ((5, 1), (16, 1), (0, 1), (31, 1)),
    ((9, 1), (32, 1), (0, 3), (7, 2), (15, 2), (3, 90)),
)
NUM_BLOCKS = 40
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A sequence of `start + count` tokens, `count` of them in the pass, from row `row` on."""

    start: int
    count: int
    row: int
    table: list[int]


def run(name: str, device: str) -> None:
    spec, block_size = SPECS[name], BLOCK_SIZES[name]
    heads = delta_heads(spec)
    dtypes = {"cpu": [torch.float32 if name == "small" else torch.float16]}.get(device, list(TOLERANCES))
    for dtype in dtypes:
        for parts, in_place in zip((*PASSES, PASSES[1]), (0, 1, 3), strict=True):
            _check(heads, parts, block_size, dtype, device, in_place=in_place)


def interpret(name: str) -> None:
    run(name, "cpu")


def _check(
    heads: DeltaHeads,
    parts: tuple[tuple[int, int], ...],
    size: int,
    dtype: torch.dtype,
    device: str,
    *,
    in_place: int,
) -> None:
    """`in_place`: blocks that change one place of a state before the next block goes on in another; 0: all blocks do."""
    places, sequences, row = torch.randperm(NUM_BLOCKS).tolist(), list[Sequence](), 0
    for start, count in parts:
        num_blocks = -(-(start + count) // size)
        own = [places.pop() for _ in range(-(-num_blocks // in_place) if in_place else 1)]
        table = [own[at // in_place if in_place else 0] for at in range(num_blocks)]
        sequences.append(Sequence(start=start, count=count, row=row, table=table))
        row += count + 2 * (count == 1)  # rows between: places of a graph that nobody has
    batch = _batch(sequences, size, device)
    num_columns = 2 * heads.channels
    x = torch.randn(row + 5, num_columns, device=device).to(dtype)
    weight = (torch.randn(heads.channels, heads.taps, device=device) * 0.5).to(dtype)
    decay, bias = torch.randn(2, heads.num_value_heads, device=device)
    pool = torch.randn(NUM_BLOCKS, 3, heads.num_value_heads * heads.key_dim * heads.value_dim, device=device)
    states = pool[:, 1:2].view(NUM_BLOCKS, 1, 1, heads.num_value_heads, -1)
    inputs = torch.randn(NUM_BLOCKS, heads.taps + 1, heads.channels, device=device).to(dtype)
    kept = inputs[:, 1 : heads.taps, None, None]
    before = pool.double().clone(), inputs.double().clone()
    expected = [_expected(each, x, weight, decay, bias, *before, heads, size) for each in sequences]
    with poisoned():
        mixed = delta.convolve(x, weight, kept, batch, heads)
        out = delta.delta_rule(mixed, x, decay, bias, states, batch, heads)
    untouched = set(range(NUM_BLOCKS))
    for each, (wanted_mixed, wanted_out, states_behind, inputs_behind) in zip(sequences, expected, strict=True):
        rows = slice(each.row, each.row + each.count)
        _close(mixed[rows], wanted_mixed, dtype)
        _close(out[rows], wanted_out, dtype)
        for block, state in states_behind.items():
            untouched.discard(block)
            _close(pool[block, 1].view_as(state), state, dtype)
            _close(kept[block, :, 0, 0], inputs_behind[block], dtype)
    rest = sorted(untouched)
    assert torch.equal(pool[rest].double(), before[0][rest])
    assert torch.equal(inputs[rest].double(), before[1][rest])
    assert torch.equal(pool[:, [0, 2]].double(), before[0][:, [0, 2]])
    norm = torch.randn(heads.value_dim, device=device).to(dtype)
    plain = torch.randn(row + 5, heads.num_value_heads, heads.value_dim, device=device).to(dtype)
    z = heads.view(x, heads.z, heads.ratio * heads.value_dim).double().reshape(plain.shape)
    wide = plain.double()
    wanted = norm.double() * wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * z * z.sigmoid()
    _close(delta.gated_norm(plain, x, norm, 1e-6, heads).view_as(wanted), wanted, dtype)


def _batch(sequences: list[Sequence], size: int, device: str) -> StateBatch:
    """Decoding sequences have the first rows."""
    decoding = [each for each in sequences if each.count == 1]
    moves = np.full((max((each.row for each in decoding), default=-3) + 3, 2), -1)
    for each in decoding:
        moves[each.row] = each.table[(each.start - 1) // size] if each.start else -1, each.table[each.start // size]
    prompts = [each for each in sequences if each.count > 1]
    width = max((len(each.table) for each in prompts), default=0)
    tables = np.array([each.table + [-7] * (width - len(each.table)) for each in prompts], dtype=np.int32)
    starts, counts, rows = (
        np.array([getattr(each, name) for each in prompts], dtype=np.int64) for name in ("start", "count", "row")
    )
    tiles, runs = deal_out_states(starts, starts + counts, rows, tables, block_size=size)
    room = np.zeros((2, 8), dtype=np.int32)
    if prompts:
        tiles, runs = np.concatenate((tiles, room)), np.concatenate((runs, room[:, :2]))
    return StateBatch(*(torch.from_numpy(each.astype(np.int32)).to(device) for each in (moves, tiles, runs)))


def _expected(
    sequence: Sequence,
    x: torch.Tensor,
    weight: torch.Tensor,
    decay: torch.Tensor,
    bias: torch.Tensor,
    pool: torch.Tensor,
    inputs: torch.Tensor,
    heads: DeltaHeads,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """The convolution's and the rule's outputs, then each written block's state and last inputs."""
    start, count, ratio = sequence.start, sequence.count, heads.ratio
    rows = x[sequence.row : sequence.row + count].double()
    widths = (heads.key_dim, heads.key_dim, ratio * heads.value_dim)
    columns = zip((heads.q, heads.k, heads.v), widths, strict=True)
    new = torch.cat([heads.view(rows, *each).flatten(1) for each in columns], dim=1)
    shape = (heads.num_value_heads, heads.key_dim, heads.value_dim)
    state, known = new.new_zeros(shape), new.new_zeros(heads.taps - 1, heads.channels)
    if start:
        block = sequence.table[(start - 1) // size]
        state, known = pool[block, 1].view(shape), inputs[block, 1 : heads.taps]
    known = torch.cat((known, new))
    mixed = torch.stack([(known[at : at + heads.taps] * weight.double().T).sum(0) for at in range(count)])
    mixed = mixed * mixed.sigmoid()
    rounded = mixed.to(x.dtype).double()
    q, k, v = rounded.split((heads.keys_size, heads.keys_size, heads.values_size), dim=1)
    q, k = (part.unflatten(1, (-1, heads.key_dim)).repeat_interleave(ratio, dim=1) for part in (q, k))
    q, k = (part / (part.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    v = v.unflatten(1, (-1, heads.value_dim))
    beta = heads.view(rows, heads.b, ratio).flatten(1).sigmoid()
    g = -decay.double().exp() * softplus(heads.view(rows, heads.a, ratio).flatten(1) + bias.double())
    out, states, last = [], {}, {}
    for at in range(count):
        state = state * g[at].exp()[:, None, None]
        added = beta[at][:, None] * (v[at] - torch.einsum("hkv,hk->hv", state, k[at]))
        state = state + k[at][:, :, None] * added[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[at]) * heads.key_dim**-0.5)
        block = sequence.table[(start + at) // size]
        states[block], last[block] = state, known[at + 1 : at + heads.taps]
    return mixed, torch.stack(out), states, last


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
