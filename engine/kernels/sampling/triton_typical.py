"""`typical.leave_typical` without a sort: a radix search for the last token that stays.

F filtered rows, V vocabulary. A token's `place` orders a row: 31 bits of its distance from the mean score, 20 of its id. Each
level weighs, by their next digit, the tokens whose digits before are those of the last one. Sums are of integers, so the order
of adding changes none.

A row's words: the tokens' weight; their scores below the best one by weight; for each level the digits before and the weight
that is still missing; for each level its bins.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel
from engine.kernels.sampling.triton_ranks import ID_BITS, is_kept, row_scores, share_of, weight_of
from engine.kernels.sampling.triton_scores import BLOCK, TILE, TYPICAL_P, WARPS, WORDS_PER_ROW, number
from engine.kernels.sampling.words import SamplingInputs

LEVELS = tl.constexpr(5)
_BITS = tl.constexpr(11)  # bits of a digit
_BINS = tl.constexpr(1 << 11)
_STATES = tl.constexpr(2)  # index of the first one
_FIRST_BIN = tl.constexpr(2 + 2 * 5)
_WIDTH = tl.constexpr(2 + 2 * 5 + 5 * (1 << 11))
_EVERYWHERE = tl.constexpr((1 << 62) - 1)


def find_typical(
    logits: torch.Tensor, inputs: SamplingInputs, counts: torch.Tensor, plan: torch.Tensor, variant: tuple[object, ...]
) -> torch.Tensor:
    """Return the sums that `is_typical` reads, after the filters that wrote `plan` [F, 8]."""
    grid = (inputs.filtered, -(-logits.shape[1] // TILE))
    found = torch.zeros((inputs.filtered, _WIDTH.value), dtype=torch.int64, device=logits.device)
    row = (logits, inputs.words, counts, inputs.filtered_at, logits.shape[1], logits.stride(0), plan, found)
    _ADD_UP.launch(grid, variant, *row, TILE, BLOCK, inputs.extras)
    for level in range(LEVELS.value):
        _WEIGH.launch(grid, (variant, level), *row, level, TILE, BLOCK, inputs.extras)
    return found


@triton.jit(do_not_specialize=["filtered_at"])
def _add_up(
    logits_RV, words, counts_SV, filtered_at, vocab_size, row_stride, plan_F8, found_FW,
    TILE: tl.constexpr, BLOCK: tl.constexpr, EXTRAS: tl.constexpr,
):  # fmt: skip
    """The first two words of a row, from one tile."""
    filtered, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(words + filtered_at + filtered)
    if number(words, row, TYPICAL_P) < 1:
        total = tl.full((), 0, tl.int64)
        weighted = tl.full((), 0, tl.int64)
        for step in range(TILE // BLOCK):
            at = tile * TILE + step * BLOCK + tl.arange(0, BLOCK)
            scores = row_scores(logits_RV, words, counts_SV, row, at, vocab_size, row_stride, EXTRAS)
            below, weights = _below(scores, at, vocab_size, words, row, plan_F8 + filtered * 8)
            total += tl.sum(weights, axis=0)
            weighted += tl.sum((below.to(tl.float64) * weights.to(tl.float64)).to(tl.int64), axis=0)
        tl.atomic_add(found_FW + filtered * _WIDTH, total, sem="relaxed")
        tl.atomic_add(found_FW + filtered * _WIDTH + 1, weighted, sem="relaxed")


@triton.jit(do_not_specialize=["filtered_at"])
def _weigh(
    logits_RV, words, counts_SV, filtered_at, vocab_size, row_stride, plan_F8, found_FW,
    LEVEL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EXTRAS: tl.constexpr,
):  # fmt: skip
    """The bins of a level, from a tile's tokens. Every program of a row first writes the same state words."""
    filtered, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(words + filtered_at + filtered)
    if number(words, row, TYPICAL_P) < 1:
        found = found_FW + filtered * _WIDTH
        digits, missing = _state(words, row, found, LEVEL)
        tl.store(found + _STATES + 2 * LEVEL, digits)
        tl.store(found + _STATES + 2 * LEVEL + 1, missing)
        for step in range(TILE // BLOCK):
            at = tile * TILE + step * BLOCK + tl.arange(0, BLOCK)
            scores = row_scores(logits_RV, words, counts_SV, row, at, vocab_size, row_stride, EXTRAS)
            below, weights = _below(scores, at, vocab_size, words, row, plan_F8 + filtered * 8)
            here = _place(below, at, found) >> (LEVELS - 1 - LEVEL) * _BITS
            begins = (weights > 0) & ((here >> _BITS) == digits)
            bins = found + _FIRST_BIN + LEVEL * _BINS + (here & (_BINS - 1))
            tl.atomic_add(bins, weights, mask=begins, sem="relaxed")


@triton.jit
def _state(words, row, found, LEVEL: tl.constexpr):
    """The digits of the last kept token before this level's, and the weight still missing."""
    digits = tl.full((), 0, tl.int64)
    missing = tl.full((), 0, tl.int64)
    if LEVEL == 0:
        part = tl.load(words + row * WORDS_PER_ROW + TYPICAL_P).to(tl.float64, bitcast=True)
        total = tl.load(found)
        missing = tl.minimum(share_of(total, part), total)
    else:
        bin = tl.arange(0, _BINS)
        weights = tl.load(found + _FIRST_BIN + (LEVEL - 1) * _BINS + bin)
        missing_before = tl.load(found + _STATES + 2 * LEVEL - 1)
        digit = tl.sum((tl.cumsum(weights, axis=0) < missing_before).to(tl.int64), axis=0)
        digits = (tl.load(found + _STATES + 2 * LEVEL - 2) << _BITS) | digit
        missing = missing_before - tl.sum(tl.where(bin < digit, weights, 0), axis=0)
    return digits, missing


@triton.jit
def last_typical(words, row, found_FW, filtered):
    """The sort key of the last kept token; above all others without `typical_p`."""
    last = tl.full((), _EVERYWHERE, tl.int64)
    if number(words, row, TYPICAL_P) < 1:
        last, _ = _state(words, row, found_FW + filtered * _WIDTH, LEVELS)
    return last


@triton.jit
def is_typical(scores, at, vocab_size, words, row, plan, found_FW, filtered, last):
    below, weights = _below(scores, at, vocab_size, words, row, plan)
    is_near = (weights > 0) & (_place(below, at, found_FW + filtered * _WIDTH) <= last)
    return is_near | (last == _EVERYWHERE)


@triton.jit
def _below(scores, at, vocab_size, words, row, plan):
    """Scores relative to the row's best, and the weights of tokens kept by other filters; both 0 for the rest."""
    highest = tl.load(plan).to(tl.int32).to(tl.float32, bitcast=True)
    kept = is_kept(scores, at, vocab_size, words, row, plan)
    weights = tl.where(kept, weight_of(scores, highest), 0)
    return tl.where((weights > 0) & (scores != highest), scores - highest, 0.0), weights


@triton.jit
def _place(below, at, found):
    mean = (tl.load(found + 1).to(tl.float64) / tl.load(found).to(tl.float64)).to(tl.float32)
    distance = tl.abs(below - mean)
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << ID_BITS) | at.to(tl.int64)


_ADD_UP = Kernel(_add_up, num_warps=WARPS, enable_fp_fusion=False)
_WEIGH = Kernel(_weigh, num_warps=WARPS, enable_fp_fusion=False)
