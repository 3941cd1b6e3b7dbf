"""Checks of the kernels that choose positions, and of attention to them, against float64 and whole numbers.

`test_triton.py` runs them in Triton's interpreter, `tests/gpu/test_kernels.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

from engine.kernels import sparse
from engine.kernels.attention import AttentionBatch, AttentionPlan, DecodeItems
from engine.kernels.codes import LATENT_KINDS, Kind
from tests.unit.kernels import references
from tests.unit.kernels.mla_checks import as_halves, kept_of, meant
from tests.unit.kernels.references import close
from tests.unit.kernels.triton_checks import Suite

DECODING, PROMPTS = [(1, 1), (1, 150)], [(9, 9), (5, 20), (1, 30), (3, 70)]


def positions_of(batch: AttentionBatch) -> torch.Tensor:
    """[T] int32: of each query."""
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    found = [
        position
        for start, end, context in zip(starts, starts[1:], contexts, strict=False)
        for position in range(context - (end - start), context)
    ]
    return torch.tensor(found, dtype=torch.int32, device=batch.context_len.device)


def with_room(plan: AttentionPlan) -> AttentionPlan:
    """The same in a captured graph with a place more, where nothing is; before the items another one is."""
    assert plan.num_decode
    nothing = torch.zeros((1, 2), dtype=torch.int32, device=plan.tables.device)
    items = plan.items[0]
    items = replace(items, items=torch.cat((items.items[:1], items.items))[1:])
    return replace(
        plan,
        num_decode=plan.num_decode + 1,
        decode=None,
        items={0: DecodeItems(items.items, torch.cat((items.parts, nothing)))},
    )


def check_selection(device: str, large: bool) -> None:
    """Scores are whole numbers, many of them equal: the choice is told exactly. The last row's are infinite or no numbers."""
    for lengths in (DECODING, PROMPTS):
        for heads, dim, most in [(4, 16, 8), (20, 24, 33)]:
            _check_selection(lengths, heads, dim, most, torch.float32, device)
    _check_selection([(1, 1), (1, 1500)], 2, 16, 1100, torch.float16, device)
    with mock.patch("engine.kernels.sparse.triton_selection.ROOM_ON_GPUS", 3_000):  # some rows at a time
        _check_selection(PROMPTS, 4, 16, 8, torch.float16, device)
    for programs in (1, 3):  # each scores several pieces
        with (
            mock.patch("engine.kernels.sparse.triton_selection.programs_of", lambda *given, count=programs: count),
            mock.patch("engine.kernels.sparse.triton_selection.PROMPT_STEP", 16),
        ):
            _check_selection(PROMPTS, 4, 16, 8, torch.float16, device)
    if large:
        for heads in (32, 64):
            for lengths in ([(1, 1 + 997 * index) for index in range(40)], [(200, 9000), (1, 1), (700, 3000)]):
                _check_selection(lengths, heads, 128, 2048, torch.bfloat16, device)


def _check_selection(
    lengths: list[tuple[int, int]], heads: int, dim: int, most: int, dtype: torch.dtype, device: str
) -> None:
    q, pool, batch = references.attention_case(
        lengths, heads=(heads, 1), head_dim=dim, block_size=16, dtype=dtype, device=device
    )
    q = (q.contiguous() * 1.2).round().clamp(-3, 3)
    keys = (pool[:, :1] * 1.2).round().clamp(-3, 3)
    weights = torch.randint(-2, 3, (len(q), heads), device=device).float()
    weights[-1, 0] = float("inf")
    positions, plan = (
        positions_of(batch),
        references.plan_of(q, batch, num_kv_heads=1, block_size=16, window=0),
    )
    expected = _expected(q, weights, keys, batch, most)
    longest = max(9000, *(context for _, context in lengths))
    for compute in (sparse.selected_positions, sparse.selected_positions.reference):
        assert torch.equal(compute(q, weights, positions, keys, plan, most, longest), expected), compute
    if plan.num_decode:
        more = [torch.cat((each, torch.zeros_like(each[:1]))) for each in (q, weights, positions)]
        found = sparse.selected_positions(*more, keys, with_room(plan), most, longest)
        assert torch.equal(found[:-1], expected)


def _expected(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, batch: AttentionBatch, most: int
) -> torch.Tensor:
    """Token by token, by sorting."""
    rows, starts = [], batch.query_start.tolist()
    for sequence, context in enumerate(batch.context_len.tolist()):
        blocks = batch.block_table[sequence, : -(-context // 16)].long()
        known = keys[blocks, 0, :, 0].flatten(0, 1).double()
        for row in range(starts[sequence], starts[sequence + 1]):
            seen = context - (starts[sequence + 1] - row) + 1
            scores = weights[row].double() @ (q[row].double() @ known[:seen].T).clamp(min=0)
            order = (-scores.nan_to_num(nan=float("-inf"))).argsort(stable=True)[:most].sort().values.int()
            rows.append(torch.nn.functional.pad(order, (0, most - len(order)), value=-1))
    return torch.stack(rows)


def check_attending(device: str, large: bool) -> None:
    for lengths in (DECODING, PROMPTS):
        for heads, rank, size, most in [(4, 32, 16, 8), (3, 40, 8, 33)]:
            _check_attending(lengths, heads, rank, size, most, torch.float32, device)
        for kind in LATENT_KINDS:
            _check_attending(lengths, 4, 32, 16, 33, torch.float16, device, kind)
    _check_attending([(1, 1), (1, 330)], 20, 16, 16, 290, torch.float16, device)  # in two parts
    if large:
        for heads in (64, 128):
            for lengths in (
                [(1, 1 + 97 * index) for index in range(40)],
                [(1, 9000)],
                [(200, 3000), (1, 1), (90, 2500)],
            ):
                _check_attending(lengths, heads, 512, 64, 2048, torch.bfloat16, device)


def _check_attending(
    lengths: list[tuple[int, int]],
    heads: int,
    rank: int,
    size: int,
    most: int,
    dtype: torch.dtype,
    device: str,
    kind: Kind | None = None,
) -> None:
    q, both, batch = references.attention_case(
        lengths, heads=(heads, 1), head_dim=rank + size, block_size=16, dtype=dtype, device=device
    )
    q, kept, scale = q.contiguous(), kept_of(both[:, :1], rank, kind), (rank + size) ** -0.5
    plan = references.plan_of(q, batch, num_kv_heads=1, block_size=16, window=0)
    latents = torch.cat((meant(kept).double(), kept.rotated.double()), dim=-1)
    listed, expected = [], torch.zeros((len(q), heads, rank), dtype=torch.float64, device=device)
    for row, seen in enumerate((positions_of(batch) + 1).tolist()):
        at = torch.randperm(seen, device=device)[:most].sort().values
        listed.append(torch.nn.functional.pad(at.int(), (0, most - len(at)), value=-1))
        sequence = int((batch.query_start <= row).sum()) - 1
        found = latents[batch.block_table[sequence].long()[at // 16], 0, at % 16, 0]
        expected[row] = (q[row].double() @ found.T * scale).softmax(dim=-1) @ found[:, :rank]
    lists = torch.stack(listed)
    for compute in (sparse.sparse_attention, sparse.sparse_attention.reference):
        close(compute(q, kept, plan, lists, rank=rank, scale=scale), expected, dtype)
    if plan.num_decode:
        more = [torch.cat((each, torch.zeros_like(each[:1]))) for each in (q, lists)]
        found = sparse.sparse_attention(more[0], kept, with_room(plan), more[1], rank=rank, scale=scale)
        close(found[:-1], expected, dtype)
        assert bool(found[-1].isnan().all()), "a place without a sequence was computed"


def check_writing(device: str, large: bool) -> None:
    for interleaved in (False, True):
        for tokens, dim, size in [(5, 32, 16), (3, 24, 24), (7, 40, 12)] + [(300, 128, 64)] * large:
            _check_writing(device, tokens, dim, size, interleaved)


def _check_writing(device: str, tokens: int, dim: int, size: int, interleaved: bool) -> None:
    dtype, block_size = torch.float16, 4
    product = torch.randn(tokens, 7 + dim, device=device).to(dtype)[:, 7:]
    positions = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int32)
    angles = torch.rand(50, size // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size, device=device)[:tokens].int()
    slots[tokens // 2] = -1  # not to be written
    norm = torch.randn(dim, device=device).to(dtype), torch.randn(dim, device=device).to(dtype)
    normed = torch.nn.functional.layer_norm(product.double(), (dim,), norm[0].double(), norm[1].double(), 1e-6)
    keys = references.rotated(as_halves(normed[:, None, :size], interleaved), positions, cos_sin)[:, 0]
    expected = torch.cat((keys, normed[:, size:]), dim=-1)
    written, at = slots >= 0, slots[slots >= 0].long()
    for compute in (sparse.write_keys, sparse.write_keys.reference):
        pool = torch.full((num_blocks, 3, 1, block_size, 1, dim), 7.0, device=device).to(dtype)
        compute(product, positions, cos_sin, slots, pool[:, 1], norm=norm, eps=1e-6, interleaved=interleaved)
        close(pool[at // block_size, 1, 0, at % block_size, 0], expected[written])
        pool[at // block_size, 1, 0, at % block_size, 0] = 7.0
        assert bool((pool == 7.0).all()), "something was written elsewhere"


CHECKS: dict[str, Callable[[str, bool], None]] = {
    "selection": check_selection,
    "attending": check_attending,
    "writing": check_writing,
}

SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
