"""Attention of new tokens to everything before them in a paged pool: variable lengths, chunks, grouped queries, a window.

T tokens of S sequences one behind the other, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size, B block size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.kernels.backend import is_hopper, programmatic_launch, use_triton
from engine.kernels.launch import is_compiling_ahead

log = logging.getLogger("baton.engine")

Ints = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger[Any]]]

DECODE_PROGRAMS = 2 * 132  # among which a decode pass's work is dealt out: two for each processor of an H200
LONG_CONTEXT = 2048  # positions; from here on larger tiles win (measured on an H200)
SMALL_TILE, LARGE_TILE = 64, 128  # queries of a tile of the prefill kernels
FEW_QUERIES = 512  # up to here small tiles keep more of the GPU busy
HOPPER_STEP = 128  # positions of a loop step of `triton_prefill_hopper`
HOPPER_PROGRAMS = 132  # of it that an H200 computes at once
LEAST_STEPS = 4  # of a part of a tile; so many positions that each query of the tile sees some of every part
HOPPER_TRIALS = ((300, 0), (40, 1300))  # queries, positions before them: in three tiles, and in one of parts
HOPPER_PAGE = 16  # positions of a block of theirs
HOPPER_TOLERANCE = 1e-2  # of its result, relative; bfloat16 has 4e-3
ROUNDS = 2  # of such programs, in which a few long contexts may be cut


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences whose new tokens lie one behind the other: where everything of them is, on the device."""

    query_start: torch.Tensor  # [S + 1] int32: rows [query_start[s], query_start[s + 1]) are sequence s's
    context_len: torch.Tensor  # [S] int32: positions in the pool, the new tokens included
    block_table: torch.Tensor  # [S, most blocks] int32
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """A decode pass's work, dealt out evenly. I items, S sequences."""

    items: (
        torch.Tensor
    )  # [I, 8] int32: row of q (-1: nothing to do), first position, end, alone, offset of the block table
    parts: torch.Tensor  # [S, 2] int32: each sequence's first item and number of items


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The prompts of a pass, or parts of them."""

    batch: AttentionBatch
    tiles: torch.Tensor  # [I, 8] int32, see `deal_out_tiles`
    rows: int  # queries of a tile
    at_once: int  # tiles with which `deal_out_tiles` cut them into parts
    blocks: torch.Tensor | None  # [I, 2] int32: the contexts' blocks, ids and positions; None: all tokens are new


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one pass attends to: `num_decode` sequences of one new token each, then prompts or parts of them."""

    num_decode: int
    decode: AttentionBatch | None  # None in a captured graph: the items say it all
    items: Mapping[int, DecodeItems]  # by window
    tables: torch.Tensor  # [...] int32: what the items' offsets count from
    prefill: PrefillPlan | None


def deal_out(context_len: Ints, *, window: int, num_kv_heads: int) -> tuple[Ints, Ints]:
    """Cut contexts [S] into items of about equal length. Returns the items [I, 8] and parts [S, 2] of `DecodeItems`, int32.

    I is at most `max_items(S)`. The items are then to be pointed to their block tables with `point`.
    """
    first = np.maximum(context_len - window, 0) if window else np.zeros_like(context_len)
    lengths = context_len - first
    counts = _ceil(lengths, _longest_item(lengths, DECODE_PROGRAMS // num_kv_heads))
    each = _ceil(_ceil(lengths, counts), 64) * 64  # even pieces, whole loop steps
    counts = _ceil(lengths, each)
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(ends[-1]) - (ends - counts)[owner]
    items = np.zeros((len(owner), 8), dtype=np.int32)
    items[:, 0] = owner
    items[:, 1] = first[owner] + piece * each[owner]
    items[:, 2] = np.minimum(items[:, 1] + each[owner], context_len[owner])
    items[:, 3] = (counts == 1)[owner]
    return items, np.stack((ends - counts, counts), axis=1).astype(np.int32)


def point(items: Ints, first: int, width: int) -> None:
    """Tell items where their sequences' block tables are: one behind the other from offset `first` on, `width` blocks each."""
    items[:, 4] = first + items[:, 0] * width


def _longest_item(lengths: Ints, at_once: int) -> int:
    """Positions of an item, in whole loop steps: of all cuts of the longest context, the one that takes the fewest steps.

    That is rounds of `at_once` items, times the steps of one and one more for its start: one item more than fits into a round
    makes everybody wait for another, and items too few for a round leave processors idle.
    """
    steps = -(-int(lengths.max()) // 64)
    sizes = np.unique(_ceil(np.full(ROUNDS * at_once, steps), np.arange(1, ROUNDS * at_once + 1)))
    counts = _ceil(lengths[:, None], 64 * sizes).sum(axis=0)
    cost = np.where(counts <= len(lengths) + ROUNDS * at_once, _ceil(counts, at_once) * (sizes + 1), np.inf)
    return 64 * int(sizes[np.argmin(cost)])


def _ceil(values: Ints, divisor: Ints | int) -> Ints:
    return -(-values // divisor)


def max_items(num_sequences: int, num_kv_heads: int) -> int:
    """The most items that `deal_out` makes of so many sequences."""
    return num_sequences + ROUNDS * (DECODE_PROGRAMS // num_kv_heads)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a model's prompts are cut into tiles on a device, see `tiling`."""

    few: int  # queries of a tile where there are few queries: small tiles keep more of the GPU busy
    many: int
    at_once: int = 0  # tiles that the GPU computes at once; 0: they are not cut into parts

    def rows(self, max_query_len: int, *, behind: bool) -> int:
        """Queries of a tile; `behind`: a context, which large tiles can be cut along."""
        return self.many if max_query_len > FEW_QUERIES or (behind and self.at_once) else self.few

    def deal_out(self, query_len: Ints, context_len: Ints, context_start: Ints, *, rows: int) -> Ints:
        """`deal_out_tiles`, cut into parts where the kernel for tiles of so many rows can add them up."""
        at_once = self.at_once if rows == self.many else 0
        return deal_out_tiles(query_len, context_len, context_start, rows=rows, at_once=at_once)


def tiling(
    device: torch.device, dtype: torch.dtype, *, num_heads: int, num_kv_heads: int, head_dim: int, window: bool
) -> Tiling:
    """The tiling for whichever kernel computes prompts of this shape here; `window`: some layers have one."""
    if head_dim > 128:
        return Tiling(LARGE_TILE, LARGE_TILE)
    if not window and hopper_works(device, dtype, num_heads, num_kv_heads, head_dim):
        return Tiling(SMALL_TILE, LARGE_TILE, HOPPER_PROGRAMS // num_heads)
    return Tiling(SMALL_TILE, LARGE_TILE)


def prefill_shape(head_dim: int, rows: int, max_context_len: int) -> tuple[int, int, int]:
    """Positions of a loop step, warps and stages of `triton_prefill` with so many queries in a tile."""
    if head_dim > 128:
        return (64, 8, 2)
    return (64 if max_context_len <= LONG_CONTEXT else 128, 4 if rows == SMALL_TILE else 8, 3)


def deal_out_tiles(query_len: Ints, context_len: Ints, context_start: Ints, *, rows: int, at_once: int = 0) -> Ints:
    """Cut the queries of S sequences, which lie one behind the other, into tiles of `rows`, the most work first.

    Returns [I, 8] int32: first row, rows, position of the first row in its context, row of the context's first key, sequence,
    part, parts. Where that leaves fewer than `at_once` tiles, those with long contexts are there once for each of their parts.
    """
    counts = -(-query_len // rows)
    owner = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * rows
    tiles = np.zeros((len(owner), 8), dtype=np.int32)
    tiles[:, 0] = (np.cumsum(query_len) - query_len)[owner] + first
    tiles[:, 1] = np.minimum(rows, query_len[owner] - first)
    tiles[:, 2] = (context_len - query_len)[owner] + first
    tiles[:, 3] = context_start[owner]
    tiles[:, 4] = owner
    tiles = tiles[np.argsort(-tiles[:, 2], kind="stable")]
    steps = _ceil(tiles[:, 2] + tiles[:, 1], HOPPER_STEP)
    tiles[:, 6] = np.clip(steps // LEAST_STEPS, 1, max(1, at_once // max(1, len(tiles))))
    parts = np.repeat(tiles, tiles[:, 6], axis=0)
    parts[:, 5] = np.arange(len(parts)) - np.repeat(np.cumsum(tiles[:, 6]) - tiles[:, 6], tiles[:, 6])
    return parts


def needs_qkv(plan: AttentionPlan, q: torch.Tensor) -> bool:
    """Whether the prefill kernel reads the new tokens' keys and values where the projection wrote them."""
    return plan.prefill is not None and plan.prefill.blocks is None and copies_in_bulk(q)


def copies_in_bulk(q: torch.Tensor) -> bool:
    """Whether the kernel with bulk copies suits: 16-bit numbers on Hopper or later (or in the interpreter)."""
    return use_triton(q) and q.element_size() == 2 and q.shape[-1] <= 256 and (not q.is_cuda or programmatic_launch(q))


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int,
    qkv: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T, Hq, D]: the i-th new token of a sequence attends to all positions up to its own.

    `kv_layer` [num_blocks, 2, B, Hkv, D] is a strided view of the pool that holds the new tokens' KV already. `window` > 0: only
    the last `window` positions, its own included. Sums are in float32. `qkv` [T, (Hq + 2 Hkv) D], its keys rotated, if
    `needs_qkv`.
    """
    out = torch.empty_like(q)
    if use_triton(q):
        both = plan.num_decode > 0 and plan.prefill is not None
        with _at_once(q.device) if both and _is_captured(q) else nullcontext() as second:
            if plan.num_decode:
                _decode(q, kv_layer, plan, out, scale=scale, window=window)
            if plan.prefill is not None:
                rows = slice(plan.num_decode, None)
                new = None if qkv is None else qkv[rows]
                with torch.cuda.stream(second):
                    _prefill(q[rows], new, kv_layer, plan.prefill, out[rows], scale=scale, window=window)
        return out
    prompts = None if plan.prefill is None else plan.prefill.batch
    for rows, batch in ((slice(plan.num_decode), plan.decode), (slice(plan.num_decode, None), prompts)):
        if batch is not None:
            out[rows] = reference(q[rows], kv_layer, batch, scale=scale, window=window)
    return out


def _is_captured(q: torch.Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def _at_once(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A second stream for work that is independent of the current stream's within the block; both go on together behind it.

    Decoding waits for memory, prompts for the tensor cores, and neither fills a GPU alone. Whoever decodes comes first: its
    programs are small and many, and would wait for a second round where a prompt's, one of which fills a processor, are there.
    """
    first, second = torch.cuda.current_stream(device), _second_stream(device)
    second.wait_stream(first)
    yield second
    first.wait_stream(second)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _decode(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
) -> None:
    from engine.kernels import triton_decode

    items = plan.items[window]
    triton_decode.paged_decode(q, kv_layer, items.items, items.parts, plan.tables, out, scale=scale)


def _prefill(
    q: torch.Tensor,
    qkv: torch.Tensor | None,
    kv_layer: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
) -> None:
    if not copies_in_bulk(q):
        from engine.kernels import triton_paged_prefill

        triton_paged_prefill.paged_prefill(
            q, kv_layer, plan.batch.block_table, plan.tiles, out, rows=plan.rows, scale=scale, window=window
        )
        return
    from engine.kernels import triton_prefill

    num_kv_heads, head_dim = kv_layer.shape[3:]
    if not window and plan.rows == LARGE_TILE and hopper_works(q.device, q.dtype, q.shape[1], num_kv_heads, head_dim):
        from engine.kernels import triton_prefill_hopper

        in_pool = plan.blocks is not None and triton_prefill_hopper.reads_pages(kv_layer.shape[2])
        if in_pool:
            keys, values = kv_layer[:, 0].flatten(2), kv_layer[:, 1].flatten(2)
        else:
            keys, values = _in_a_row(qkv, kv_layer, plan)
        triton_prefill_hopper.prefill(
            q, keys, values, plan.tiles, out, num_kv_heads=num_kv_heads, scale=scale, at_once=plan.at_once,
            blocks=plan.blocks if in_pool else None,
        )  # fmt: skip
        return
    keys, values = _in_a_row(qkv, kv_layer, plan)
    triton_prefill.prefill(
        q, keys, values, plan.tiles, out,
        rows=plan.rows, num_kv_heads=num_kv_heads, scale=scale, window=window, max_context_len=plan.batch.max_context_len,
    )  # fmt: skip


def _in_a_row(qkv: torch.Tensor | None, kv_layer: torch.Tensor, plan: PrefillPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [C, Hkv D] of the contexts, one behind the other: as the projection wrote them, or copied from the pool."""
    from engine.kernels import triton_prefill

    if plan.blocks is not None:
        return triton_prefill.gather_context(kv_layer, plan.blocks)
    assert qkv is not None, "needs_qkv"
    width = kv_layer.shape[3] * kv_layer.shape[4]
    return qkv[:, -2 * width : -width], qkv[:, -width:]


def hopper_works(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether `triton_prefill_hopper` computes this shape here: Gluon is experimental, so a small case is tried first.

    If it doesn't, a line in the log says why, and `triton_prefill` goes on. Where kernels are only compiled it is hoped to.
    """
    if not is_hopper(device) or dtype.itemsize != 2 or head_dim not in (64, 128):
        return False
    return is_compiling_ahead() or _hopper_was_right(device, dtype, num_heads, num_kv_heads, head_dim)


@functools.cache
def _hopper_was_right(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    reason = ""
    for queries, before in HOPPER_TRIALS:
        reason = reason or _hopper_trial(device, dtype, num_heads, num_kv_heads, head_dim, queries, before)
    if reason:
        log.warning("engine.hopper_attention_unused", extra={"reason": reason})
    return not reason


def _hopper_trial(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    queries: int,
    before: int,
) -> str:
    """What is wrong with the result for `queries`, alone or behind `before` positions in a pool; "" if nothing is."""
    random = torch.Generator(device).manual_seed(0)
    context, scale, at_once = queries + before, head_dim**-0.5, HOPPER_PROGRAMS // num_heads
    counts = -(-context // HOPPER_PAGE)
    q = torch.randn(queries, num_heads, head_dim, device=device, dtype=dtype, generator=random)
    pool = torch.randn(counts, 2, HOPPER_PAGE, num_kv_heads, head_dim, device=device, dtype=dtype, generator=random)
    table = torch.arange(counts, device=device, dtype=torch.int32)
    table = table.flip(0) if before else table
    new, all_ = np.array([queries]), np.array([context])
    tiles = deal_out_tiles(new, all_, np.zeros(1, dtype=np.int64), rows=LARGE_TILE, at_once=at_once)
    out = torch.empty_like(q)
    try:
        from engine.kernels import triton_prefill_hopper

        keys, values = pool.transpose(0, 1).flatten(3)
        triton_prefill_hopper.prefill(
            q,
            keys if before else keys.flatten(0, 1),
            values if before else values.flatten(0, 1),
            torch.from_numpy(tiles).to(device),
            out,
            num_kv_heads=num_kv_heads,
            scale=scale,
            at_once=at_once,
            blocks=torch.stack((table, torch.full_like(table, HOPPER_PAGE)), dim=1) if before else None,
        )
        expected = _one_sequence(q, pool, table, context, scale, 0)
        error = float((out.float() - expected.float()).norm() / expected.float().norm())
    except Exception as problem:  # whatever an experimental compiler raises
        return f"{type(problem).__name__}: {problem}"[:200]
    return "" if error < HOPPER_TOLERANCE else f"relative error {error:.2g}"


def reference(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, *, scale: float, window: int
) -> torch.Tensor:
    """The twin: sequence by sequence; a batch that only decodes is computed padded, in one go."""
    if batch.max_query_len == 1 and len(batch.context_len) > 1:
        return _decode_reference(q, kv_layer, batch, scale, window)
    starts, lengths = batch.query_start.tolist(), batch.context_len.tolist()
    out = torch.empty_like(q)
    for index, context in enumerate(lengths):
        rows = slice(starts[index], starts[index + 1])
        out[rows] = _one_sequence(q[rows], kv_layer, batch.block_table[index], context, scale, window)
    return out


def _one_sequence(
    q: torch.Tensor, kv_layer: torch.Tensor, table: torch.Tensor, context: int, scale: float, window: int
) -> torch.Tensor:
    """`q` [Q, Hq, D] of one sequence with `context` positions -> [Q, Hq, D]."""
    block_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    first = max(0, context - len(q) - window + 1) // block_size if window else 0
    blocks = table[first : -(-context // block_size)].long()
    keys, values = kv_layer[blocks].unbind(1)  # [blocks, B, Hkv, D]
    first_position = first * block_size
    keys, values = (x.flatten(0, 1)[: context - first_position].float() for x in (keys, values))  # [C, Hkv, D]
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # [Q, Hkv, G, D]
    scores = torch.einsum("qhgd,chd->hgqc", grouped, keys) * scale
    query_at = torch.arange(context - len(q), context, device=q.device)[:, None]
    key_at = torch.arange(first_position, context, device=q.device)
    hidden = key_at > query_at
    if window:
        hidden = hidden | (key_at <= query_at - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgqc,chd->qhgd", weights, values).flatten(1, 2).to(q.dtype)


def _decode_reference(
    q: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, scale: float, window: int
) -> torch.Tensor:
    """One new token each: `q` [S, Hq, D], contexts padded to the longest."""
    block_size, num_kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    count = -(-batch.max_context_len // block_size)
    keys, values = kv_layer[batch.block_table[:, :count].long()].unbind(2)  # [S, blocks, B, Hkv, D]
    keys, values = (x.flatten(1, 2).float() for x in (keys, values))  # [S, C, Hkv, D]
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # [S, Hkv, G, D]
    scores = torch.einsum("shgd,schd->shgc", grouped, keys) * scale
    at = torch.arange(keys.shape[1], device=q.device)
    lengths = batch.context_len.long()[:, None]
    hidden = at >= lengths
    if window:
        hidden = hidden | (at < lengths - window)
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1)
    values = values.masked_fill((at >= lengths)[:, :, None, None], 0.0)  # rows of others may hold NaN: 0 * NaN is NaN
    return torch.einsum("shgc,schd->shgd", weights, values).flatten(1, 2).to(q.dtype)
