"""Triton versions of `selection.write_keys` and `selection.selected_positions`.

Scores are written for some rows at a time. A radix select over their bits finds each row's top-k, listed in the order of
positions: the selection does not depend on the order in which programs run. Rows that see at most K positions need no scores.

T tokens, H heads of the indexer, D their size, B block size, K positions at most, S scores of a row.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention import AttentionPlan
from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.mla import ROOM_ON_GPUS
from engine.kernels.mla.triton_write import cos_sin_at, pair

STEP, PROMPT_STEP = 64, 128  # positions a loop step scores
BLOCK = 1024  # scores a loop step reads
# Scoring programs a processor, for prompts: several waves, so that the tail of the last wave is short.
PROGRAMS_A_PROCESSOR = 32


def write_keys(
    product: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    interleaved: bool,
) -> None:
    dim, size = product.shape[1], cos_sin.shape[1]
    if not len(product):
        return
    _WRITE.launch(
        (len(product),), None,
        product, positions, cos_sin, slots, keys, *norm, eps, product.stride(0), keys.stride(0), keys.stride(2),
        D=dim, D_PADDED=triton.next_power_of_2(dim), HALF=size // 2, HALF_PADDED=triton.next_power_of_2(size // 2),
        B=keys.shape[2], INTERLEAVED=interleaved, num_warps=1,
    )  # fmt: skip


def selected_positions(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    plan: AttentionPlan,
    most: int,
    longest: int,
) -> torch.Tensor:
    selected = torch.empty((len(q), most), dtype=torch.int32, device=q.device)
    decoding = plan.num_decode
    if decoding:
        rows, width = slice(decoding), longest if plan.decode is None else plan.decode.max_context_len
        _choose(
            q[rows], weights[rows], positions[rows], keys, plan.items[0].items, plan.tables, 0, selected[rows], width
        )
    if decoding < len(q):
        rows, nothing = slice(decoding, None), plan.tables.new_empty((0, 8))
        tiles, tables, width, tile_rows = nothing, plan.tables, 0, 1
        if plan.prefill is not None:
            tiles, tables = plan.prefill.tiles, plan.prefill.batch.block_table
            width, tile_rows = plan.prefill.batch.max_context_len, plan.prefill.rows
        _choose(
            q[rows], weights[rows], positions[rows], keys, tiles, tables, tables.stride(0), selected[rows], width,
            tile_rows=tile_rows,
        )  # fmt: skip
    return selected


def programs_of(rows: int, sequences: int, tile_rows: int, width: int, most: int, processors: int) -> int:
    """Count the programs that score the last `rows` of prompts whose longest context has `width` positions. Any number works.

    Of a sequence only the rows behind `most` positions have scores. No more tiles than these fill do, and of each sequence one
    sees the longest context, one that without its rows, and so on.
    """
    tiles = triton.cdiv(min(rows, sequences * (width - most)), tile_rows) + sequences - 1
    pieces = (triton.cdiv(width - index // sequences * tile_rows, PROMPT_STEP) for index in range(tiles))
    return max(1, min(sum(pieces), PROGRAMS_A_PROCESSOR * processors))


def _choose(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    items: torch.Tensor,
    tables: torch.Tensor,
    table_row: int,
    selected: torch.Tensor,
    width: int,
    *,
    tile_rows: int = 0,
) -> None:
    """Fill `selected`; `width`: positions of the longest context. Rows without an item see no more than K positions.

    `tile_rows`: queries of a tile; 0: the items are those of sequences that decode.
    """
    (num_rows, num_heads, dim), most = q.shape, selected.shape[1]
    has_scores = width > most and len(items) > 0
    step = max(1, min(num_rows, ROOM_ON_GPUS // (4 * width))) if has_scores else num_rows
    if 0 < tile_rows < step:  # whole tiles, whose keys are read once
        step -= step % tile_rows
    scores = torch.empty((step if has_scores else 0, width), dtype=torch.float32, device=q.device)
    processors, sequences = describe(q.device).processors, len(tables)
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first)
        if has_scores:
            programs = len(items)
            if tile_rows:
                behind = num_rows - first - count if sequences == 1 else 0
                programs = programs_of(count, sequences, tile_rows, width - behind, most, processors)
            _SCORE.launch(
                (programs,), None,
                q, weights, positions, keys, items, tables, scores, len(items), first, count, most, table_row, width,
                q.stride(0), keys.stride(0), keys.stride(2),
                H=num_heads, H_PADDED=max(16, triton.next_power_of_2(num_heads)), D=dim,
                D_PADDED=max(16, triton.next_power_of_2(dim)), B=keys.shape[2],
                STEP=PROMPT_STEP if tile_rows else STEP, DECODE=not tile_rows,
                num_warps=4, num_stages=2,
            )  # fmt: skip
        _HIGHEST.launch(
            (count,), None, scores, positions, selected, first, width, K=most, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _write(
    product, positions_T, cos_sin_PR, slots_T, keys, norm_D, bias_D, eps, product_row, keys_block, keys_slot,
    D: tl.constexpr, D_PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, B: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_T + token).to(tl.int64)
    if slot >= 0:
        d, r = tl.arange(0, D_PADDED), tl.arange(0, HALF_PADDED)
        source, target = product + token * product_row, keys + slot // B * keys_block + slot % B * keys_slot
        x = tl.load(source + d, mask=d < D, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=0) / D
        away = tl.where(d < D, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(away * away, axis=0) / D + eps)
        rest = (d >= 2 * HALF) & (d < D)
        normed = _normed(source, norm_D, bias_D, d, rest, mean, scale)
        tl.store(target + d, normed.to(keys.dtype.element_ty), mask=rest)
        inside = r < HALF
        cos, sin = cos_sin_at(positions_T + token, cos_sin_PR, r, inside, HALF)
        first_at, second_at = pair(r, HALF, INTERLEAVED)
        first = _normed(source, norm_D, bias_D, first_at, inside, mean, scale)
        second = _normed(source, norm_D, bias_D, second_at, inside, mean, scale)
        tl.store(target + r, (first * cos - second * sin).to(keys.dtype.element_ty), mask=inside)
        tl.store(target + HALF + r, (second * cos + first * sin).to(keys.dtype.element_ty), mask=inside)


@triton.jit
def _normed(source, norm_D, bias_D, d, inside, mean, scale):
    """The norm in float32, rounded to the compute dtype like the norm's result."""
    x = tl.load(source + d, mask=inside, other=0.0)
    weight = tl.load(norm_D + d, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_D + d, mask=inside, other=0.0).to(tl.float32)
    return ((x.to(tl.float32) - mean) * scale * weight + bias).to(x.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_items", "first", "count", "most", "table_row", "width"])
def _score(
    q_THD, weights_TH, positions_T, keys, items_I8, tables, scores_TS, num_items, first, count, most, table_row, width,
    q_token, keys_block, keys_slot,
    H: tl.constexpr, H_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, B: tl.constexpr,
    STEP: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Write the scores of rows [first, first + count): of a decode item, or of the tiles' contexts piece by piece."""
    head, d = tl.arange(0, H_PADDED), tl.arange(0, D_PADDED)
    q_at = head[:, None] * D + d[None, :]
    there = (head < H)[:, None] & (d < D)[None, :]
    if DECODE:
        item = items_I8 + tl.program_id(0) * 8
        row = tl.load(item)
        if (row < first) | (row >= first + count):
            return
        if tl.load(positions_T + row) < most:
            return
        end = tl.load(item + 2)
        q = tl.load(q_THD + row.to(tl.int64) * q_token + q_at, mask=there, other=0.0)
        weights = tl.load(weights_TH + row * H + head, mask=head < H, other=0.0)
        for at in tl.range(tl.load(item + 1), end, STEP, num_stages=2):
            known = _keys_of(keys, tables + tl.load(item + 4), at, end, d, keys_block, keys_slot, D, B, STEP)
            _store_scores(q, weights, known, scores_TS + (row - first).to(tl.int64) * width, at, end, STEP)
    else:
        programs, turn = tl.num_programs(0), tl.program_id(0)  # the first of this tile's pieces for this program
        for index in range(num_items):
            item = items_I8 + index * 8
            first_row, num_rows, first_position = tl.load(item), tl.load(item + 1), tl.load(item + 2)
            # The tile's queries in this range that see more positions than the top-k.
            begin = tl.maximum(most - first_position, tl.maximum(first - first_row, 0))
            stop = tl.minimum(num_rows, first + count - first_row)
            end = first_position + stop
            pieces = tl.where(begin < stop, tl.cdiv(end, STEP), 0)
            table = tables + tl.load(item + 4).to(tl.int64) * table_row
            for piece in range(turn, pieces, programs):
                at = piece * STEP
                known = _keys_of(keys, table, at, end, d, keys_block, keys_slot, D, B, STEP)
                for query in tl.range(tl.maximum(begin, at - first_position), stop, num_stages=2):
                    row = first_row + query
                    q = tl.load(q_THD + row.to(tl.int64) * q_token + q_at, mask=there, other=0.0)
                    weights = tl.load(weights_TH + row * H + head, mask=head < H, other=0.0)
                    seen = first_position + query + 1
                    _store_scores(q, weights, known, scores_TS + (row - first).to(tl.int64) * width, at, seen, STEP)
            turn += tl.cdiv(tl.maximum(pieces - turn, 0), programs) * programs - pieces


@triton.jit
def _keys_of(
    keys, table, at, end, d, keys_block, keys_slot, D: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The keys of positions [at, at + STEP), [STEP, D]; 0 from `end` on."""
    n = at + tl.arange(0, STEP)
    block = tl.load(table + n // B, mask=n < end, other=0).to(tl.int64)
    where = keys + (block * keys_block + n % B * keys_slot)[:, None] + d[None, :]
    return tl.load(where, mask=(n < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_scores(q, weights, known, scores, at, end, STEP: tl.constexpr):
    """Store scores. Positions are the product's rows, so that few threads reduce over a row's heads."""
    products = tl.maximum(tl.dot(known, tl.trans(q), input_precision="ieee"), 0.0)
    n = at + tl.arange(0, STEP)
    tl.store(scores + n, tl.sum(products * weights[None, :], axis=1), mask=n < end)


@triton.jit(do_not_specialize=["first", "width"])
def _highest(scores_TS, positions_T, selected_TK, first, width, K: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    seen = tl.load(positions_T + first + index) + 1
    scores, selected = scores_TS + index * width, selected_TK + (first + index) * K
    if seen <= K:
        for at in range(0, K, BLOCK):
            n = at + tl.arange(0, BLOCK)
            tl.store(selected + n, tl.where(n < seen, n, -1), mask=n < K)
    else:
        # The digits of the last selected score, and the number selected with these digits.
        last, room = 0, K
        bin = tl.arange(0, 256)
        for digit in tl.static_range(4):
            counts = tl.zeros((256,), tl.int32)
            for at in range(0, seen, BLOCK):
                n = at + tl.arange(0, BLOCK)
                bits = _ordered(tl.load(scores + n, mask=n < seen, other=0.0)) >> (24 - 8 * digit)
                alike = n < seen
                if digit > 0:
                    alike = alike & ((bits >> 8) == last)
                # The first digit has the sign: negative scores come first.
                counts += tl.histogram((bits & 0xFF) ^ (0x80 if digit == 0 else 0), 256, mask=alike)
            enough = tl.cumsum(counts, axis=0, reverse=True) >= room
            found = tl.sum(enough.to(tl.int32), axis=0) - 1
            room -= tl.sum(tl.where(bin > found, counts, 0), axis=0)
            last = found - 128 if digit == 0 else (last << 8) | found
        higher, equal = 0, 0  # listed positions, and ties at the last score so far
        for at in range(0, seen, BLOCK):
            n = at + tl.arange(0, BLOCK)
            bits = _ordered(tl.load(scores + n, mask=n < seen, other=0.0))
            alike = ((n < seen) & (bits == last)).to(tl.int32)
            before = equal + tl.cumsum(alike, axis=0) - alike
            taken = (n < seen) & ((bits > last) | ((bits == last) & (before < room)))
            one = taken.to(tl.int32)
            tl.store(selected + higher + tl.cumsum(one, axis=0) - one, n, mask=taken)
            higher += tl.sum(one, axis=0)
            equal += tl.sum(alike, axis=0)


@triton.jit
def _ordered(score):
    """Integers in the order of the scores; both zeros are equal, and NaN is the lowest."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


_WRITE, _SCORE, _HIGHEST = Kernel(_write), Kernel(_score), Kernel(_highest)
