"""top_k, top_p and min_p without a sort: each filter keeps the most likely tokens, so all are one threshold.

F filtered rows, V vocabulary, T tiles. Each row's tokens are counted (and weighed) in bins of their distance from the row's best
score; tokens of the bins around the cut are collected, and bisection finds its rank among them. What typical_p leaves out comes
after that.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel
from engine.kernels.sampling.triton_ranks import ID_BITS, is_kept, rank_of, row_scores, share_of, weight_of
from engine.kernels.sampling.triton_scores import (
    BLOCK,
    TILE,
    TOP_K,
    TOP_P,
    WARPS,
    WORDS_PER_ROW,
    minus_noise,
    number,
    store_winner,
)
from engine.kernels.sampling.triton_typical import find_typical, is_typical, last_typical
from engine.kernels.sampling.words import SamplingInputs

BINS = 2048  # by distance from a row's best score
MEMBERS = 8192  # collected tokens; with more, the whole row is read repeatedly
# Tokens of an inner block: in the other loop order ptxas 12.8 spills a few registers.
CUT_BLOCK, CUT_BLOCK_WITH_EXTRAS = 1024, 2048

_BIN_SHIFT = tl.constexpr(16)  # a bin spans 1/128 of its distance ...
_FIRST_BIN = tl.constexpr((127 - 6) << 7)  # ... between 2**-6 and 2**10
_NOWHERE = tl.constexpr(-(1 << 62))  # below every rank


def draw_filtered(
    logits: torch.Tensor,
    inputs: SamplingInputs,
    counts: torch.Tensor,
    partial: torch.Tensor,
    variant: tuple[object, ...],
) -> None:
    """Draw for the filtered rows. `partial` [4, R, T] first holds their best scores without noise, then the draws."""
    _, num_rows, tiles = partial.shape
    vocab_size, extras, device = logits.shape[1], inputs.extras, logits.device
    bins = torch.zeros((inputs.filtered, 2, BINS), dtype=torch.int64, device=device)
    plan = torch.empty((inputs.filtered, 8), dtype=torch.int64, device=device)
    members = torch.empty((inputs.filtered, MEMBERS), dtype=torch.int64, device=device)
    row = (logits, inputs.words, counts, inputs.filtered_at, vocab_size, logits.stride(0))
    every_row, every_tile, padded = (inputs.filtered,), (inputs.filtered, tiles), triton.next_power_of_2(tiles)
    variant = (*variant, extras)
    block = CUT_BLOCK_WITH_EXTRAS if extras else CUT_BLOCK
    _FILL_BINS.launch(every_tile, variant, *row, partial, bins, tiles, TILE, BLOCK, BINS, padded, extras)
    _PLAN.launch(
        every_row, variant, inputs.words, partial, bins, plan, inputs.filtered_at, vocab_size, tiles, BINS, padded
    )
    _COLLECT.launch(every_tile, variant, *row, plan, members, TILE, BLOCK, BINS, MEMBERS, extras)
    _CUT.launch(every_row, variant, *row, plan, members, block, BINS, MEMBERS, extras)
    found = find_typical(logits, inputs, counts, plan, variant) if inputs.typical else plan
    _DRAW_KEPT.launch(
        every_tile, (variant, inputs.typical),
        *row, plan, found, partial, num_rows, tiles, TILE, BLOCK, extras, inputs.typical,
    )  # fmt: skip


@triton.jit(do_not_specialize=["filtered_at", "tiles"])
def _fill_bins(
    logits_RV, words, counts_SV, filtered_at, vocab_size, row_stride, partial, bins_F2B, tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, TILES: tl.constexpr, EXTRAS: tl.constexpr,
):  # fmt: skip
    """Count a tile's tokens in their bins if the row has top_k, weigh them if it has top_p."""
    filtered, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(words + filtered_at + filtered)
    counted = tl.load(words + row * WORDS_PER_ROW + TOP_K) < vocab_size
    weighed = number(words, row, TOP_P) < 1
    if counted | weighed:
        highest = _highest(partial, row, tiles, TILES)
        for step in range(TILE // BLOCK):
            at = tile * TILE + step * BLOCK + tl.arange(0, BLOCK)
            scores = row_scores(logits_RV, words, counts_SV, row, at, vocab_size, row_stride, EXTRAS)
            target = bins_F2B + filtered * 2 * BINS + _bin(scores, highest, BINS)
            if counted:
                tl.atomic_add(target, tl.full((BLOCK,), 1, tl.int64), mask=at < vocab_size, sem="relaxed")
            if weighed:
                weight = weight_of(scores, highest)
                tl.atomic_add(target + BINS, weight, mask=(at < vocab_size) & (weight > 0), sem="relaxed")


@triton.jit(do_not_specialize=["filtered_at", "tiles"])
def _plan(
    words, partial, bins_F2B, plan_F8, filtered_at, vocab_size, tiles, BINS: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The position of the row's threshold: best score, first and last bin, and the mass of the bins before."""
    filtered = tl.program_id(0).to(tl.int64)
    row = tl.load(words + filtered_at + filtered)
    top_k = tl.load(words + row * WORDS_PER_ROW + TOP_K)
    top_p = tl.load(words + row * WORDS_PER_ROW + TOP_P).to(tl.float64, bitcast=True)
    bin = tl.arange(0, BINS)
    counts = tl.load(bins_F2B + filtered * 2 * BINS + bin)
    weights = tl.load(bins_F2B + filtered * 2 * BINS + BINS + bin)
    last = tl.full((), BINS - 1, tl.int32)
    if top_k < vocab_size:
        last = tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0)
    first = tl.where(top_k < vocab_size, last, 0)
    certain = tl.full((), 0, tl.int64)
    if top_p < 1:
        certain = tl.sum(tl.where((bin < last) | (top_k >= vocab_size), weights, 0), axis=0)
        reached = tl.cumsum(weights, axis=0) < share_of(certain, top_p)
        first = tl.minimum(tl.sum(reached.to(tl.int32), axis=0), last)
        last = tl.where(top_k < vocab_size, last, first)
    plan = plan_F8 + filtered * 8
    tl.store(plan, _highest(partial, row, tiles, TILES).to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(plan + 1, first.to(tl.int64))
    tl.store(plan + 2, last.to(tl.int64))
    tl.store(plan + 3, tl.sum(tl.where(bin < first, counts, 0), axis=0))
    tl.store(plan + 4, tl.sum(tl.where(bin < first, weights, 0), axis=0))
    tl.store(plan + 5, tl.full((), 0, tl.int64))  # members
    tl.store(plan + 6, certain)  # without top_k: the row's weight
    tl.store(plan + 7, tl.full((), _NOWHERE, tl.int64))  # the threshold


@triton.jit(do_not_specialize=["filtered_at"])
def _collect(
    logits_RV, words, counts_SV, filtered_at, vocab_size, row_stride, plan_F8, members_FM,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, MEMBERS: tl.constexpr, EXTRAS: tl.constexpr,
):  # fmt: skip
    """Append the ranks of a tile's tokens in the planned bins, in any order."""
    filtered, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(words + filtered_at + filtered)
    if (tl.load(words + row * WORDS_PER_ROW + TOP_K) < vocab_size) | (number(words, row, TOP_P) < 1):
        plan = plan_F8 + filtered * 8
        highest = tl.load(plan).to(tl.int32).to(tl.float32, bitcast=True)
        first, last = tl.load(plan + 1), tl.load(plan + 2)
        for step in range(TILE // BLOCK):
            at = tile * TILE + step * BLOCK + tl.arange(0, BLOCK)
            scores = row_scores(logits_RV, words, counts_SV, row, at, vocab_size, row_stride, EXTRAS)
            bin = _bin(scores, highest, BINS)
            member = (at < vocab_size) & (bin >= first) & (bin <= last)
            count = tl.sum(member.to(tl.int32), axis=0)
            if count > 0:
                start = tl.atomic_add(plan + 5, count.to(tl.int64), sem="relaxed")
                slot = start + tl.cumsum(member.to(tl.int32), axis=0) - 1
                tl.store(members_FM + filtered * MEMBERS + slot, rank_of(scores, at), mask=member & (slot < MEMBERS))


@triton.jit(do_not_specialize=["filtered_at"])
def _cut(
    logits_RV, words, counts_SV, filtered_at, vocab_size, row_stride, plan_F8, members_FM,
    BLOCK: tl.constexpr, BINS: tl.constexpr, MEMBERS: tl.constexpr, EXTRAS: tl.constexpr,
):  # fmt: skip
    """Find the rank of the last token kept by top_k, then of the last one kept by top_p among them."""
    filtered = tl.program_id(0).to(tl.int64)
    row = tl.load(words + filtered_at + filtered)
    top_k = tl.load(words + row * WORDS_PER_ROW + TOP_K)
    top_p = tl.load(words + row * WORDS_PER_ROW + TOP_P).to(tl.float64, bitcast=True)
    if (top_k < vocab_size) | (top_p < 1):
        plan, members = plan_F8 + filtered * 8, members_FM + filtered * MEMBERS
        low = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        high = tl.full((), _NOWHERE, tl.int64)
        weight = tl.full((), 0, tl.int64)
        size = tl.load(plan + 5)
        for start in range(0, tl.where(size <= MEMBERS, size, vocab_size), BLOCK):
            ranks, member, weights = _members(
                logits_RV, words, counts_SV, row, vocab_size, row_stride, plan, members, start,
                BLOCK, BINS, MEMBERS, EXTRAS,
            )  # fmt: skip
            low = tl.minimum(low, tl.min(tl.where(member, ranks, 0x7FFFFFFFFFFFFFFF), axis=0))
            high = tl.maximum(high, tl.max(tl.where(member, ranks, _NOWHERE), axis=0))
            weight += tl.sum(weights, axis=0)
        high += 1
        total = tl.load(plan + 6)
        if top_k < vocab_size:
            low, size, weight = _bisect(
                logits_RV, words, counts_SV, row, vocab_size, row_stride, plan, members,
                low, high, size, weight, top_k - tl.load(plan + 3), False, BLOCK, BINS, MEMBERS, EXTRAS,
            )  # fmt: skip
            total = tl.load(plan + 4) + weight
        if top_p < 1:
            low, size, weight = _bisect(
                logits_RV, words, counts_SV, row, vocab_size, row_stride, plan, members,
                low, high, size, weight, share_of(total, top_p) - tl.load(plan + 4), True, BLOCK, BINS, MEMBERS, EXTRAS,
            )  # fmt: skip
        tl.store(plan + 7, low)


@triton.jit
def _bisect(
    logits_RV, words, counts_SV, row, vocab_size, row_stride, plan, members, low, high, size_low, weight_low, wanted,
    BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, MEMBERS: tl.constexpr, EXTRAS: tl.constexpr,
):  # fmt: skip
    """The highest rank from which the members' number (or weight) reaches the target; their number and weight.

    All from `low` up reach it; from `high` up they do not. `size_low` and `weight_low` are totals from `low` up.
    """
    size_high = tl.full((), 0, tl.int64)
    listed = tl.load(plan + 5)
    looked_at = tl.where(listed <= MEMBERS, listed, vocab_size)
    while size_low - size_high > 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        size = tl.full((), 0, tl.int64)
        weight = tl.full((), 0, tl.int64)
        for start in range(0, looked_at, BLOCK):
            ranks, member, weights = _members(
                logits_RV, words, counts_SV, row, vocab_size, row_stride, plan, members, start,
                BLOCK, BINS, MEMBERS, EXTRAS,
            )  # fmt: skip
            above = member & (ranks >= middle)
            size += tl.sum(above.to(tl.int32), axis=0)
            weight += tl.sum(tl.where(above, weights, 0), axis=0)
        enough = (weight if BY_WEIGHT else size) >= wanted
        low = tl.where(enough, middle, low)
        size_low = tl.where(enough, size, size_low)
        weight_low = tl.where(enough, weight, weight_low)
        high = tl.where(enough, high, middle)
        size_high = tl.where(enough, size_high, size)
    return low, size_low, weight_low


@triton.jit
def _members(
    logits_RV, words, counts_SV, row, vocab_size, row_stride, plan, members, start,
    BLOCK: tl.constexpr, BINS: tl.constexpr, MEMBERS: tl.constexpr, EXTRAS: tl.constexpr,
):  # fmt: skip
    """A block of the tokens in the planned bins: ranks, mask, weights."""
    at = start + tl.arange(0, BLOCK)
    highest = tl.load(plan).to(tl.int32).to(tl.float32, bitcast=True)
    size = tl.load(plan + 5)
    if size <= MEMBERS:
        member = at < size
        ranks = tl.load(members + at, mask=member, other=_NOWHERE)
    else:
        scores = row_scores(logits_RV, words, counts_SV, row, at, vocab_size, row_stride, EXTRAS)
        bin = _bin(scores, highest, BINS)
        member = (at < vocab_size) & (bin >= tl.load(plan + 1)) & (bin <= tl.load(plan + 2))
        ranks = rank_of(scores, at)
    key = (ranks >> ID_BITS).to(tl.int32)
    scores = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return ranks, member, tl.where(member, weight_of(scores, highest), 0)


@triton.jit(do_not_specialize=["filtered_at", "num_rows", "tiles"])
def _draw_kept(
    logits_RV, words, counts_SV, filtered_at, vocab_size, row_stride, plan_F8, found_FW, partial, num_rows, tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr, EXTRAS: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """A tile's best token with noise, among those kept by the row's filters."""
    filtered, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(words + filtered_at + filtered)
    plan = plan_F8 + filtered * 8
    if TYPICAL:
        last = last_typical(words, row, found_FW, filtered)
    best = float("-inf")
    winner = tile * TILE
    for step in range(TILE // BLOCK):
        at = tile * TILE + step * BLOCK + tl.arange(0, BLOCK)
        scores = row_scores(logits_RV, words, counts_SV, row, at, vocab_size, row_stride, EXTRAS)
        kept = is_kept(scores, at, vocab_size, words, row, plan)
        if TYPICAL:
            kept &= is_typical(scores, at, vocab_size, words, row, plan, found_FW, filtered, last)
        if tl.sum(kept.to(tl.int32), axis=0) > 0:
            noisy = tl.where(kept, scores - minus_noise(words, row, at), float("-inf"))
            top = tl.max(noisy, axis=0)
            token_id = tl.min(tl.where(noisy == top, at, 0x7FFFFFFF), axis=0)
            winner = tl.where(top > best, token_id, winner)
            best = tl.maximum(top, best)
    tl.store(partial + row * tiles + tile, best)
    store_winner(partial, num_rows, tiles, row, tile, winner)


@triton.jit
def _highest(partial, row, tiles, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(partial + row * tiles + tile, mask=tile < tiles, other=float("-inf")), axis=0)


@triton.jit
def _bin(scores, highest, BINS: tl.constexpr):
    """The bin of a score: 0 for the most likely tokens, monotone in the score."""
    distance = tl.where(scores == highest, 0.0, highest - scores)
    bin = (distance.to(tl.int32, bitcast=True) >> _BIN_SHIFT) - _FIRST_BIN
    return tl.minimum(tl.maximum(bin, 0), BINS - 1)


_FILL_BINS = Kernel(_fill_bins, num_warps=WARPS, enable_fp_fusion=False)
_PLAN = Kernel(_plan, num_warps=8)
_COLLECT = Kernel(_collect, num_warps=WARPS, enable_fp_fusion=False)
_CUT = Kernel(_cut, num_warps=8, enable_fp_fusion=False)
_DRAW_KEPT = Kernel(_draw_kept, num_warps=WARPS, enable_fp_fusion=False)
