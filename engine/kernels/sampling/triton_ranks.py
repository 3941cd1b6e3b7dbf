"""Rows of scores as shared by the filters: order, weights, and the tokens above a threshold.

A token's `rank` is an int64 that orders a row: score first, then smaller id. Weights are integers, so the order of adding
changes no sum.
"""

import triton
import triton.language as tl

from engine.kernels.sampling.triton_scores import MIN_P, TEMPERATURE, adjusted, number, tempered

ID_BITS = tl.constexpr(20)  # the low bits of a rank: `words.MAX_VOCAB`
ID_MASK = tl.constexpr((1 << 20) - 1)
_ONE = tl.constexpr(float(1 << 42))  # weight of the best token; V of them fit 63 bits


@triton.jit
def row_scores(logits_RV, words, counts_SV, row, at, vocab_size, row_stride, EXTRAS: tl.constexpr):
    raw = tl.load(logits_RV + row * row_stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    return tempered(adjusted(raw, at, words, counts_SV, row, vocab_size, EXTRAS), number(words, row, TEMPERATURE))


@triton.jit
def rank_of(scores, at):
    key = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    key = key ^ ((key >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << ID_BITS) | (at ^ ID_MASK).to(tl.int64)


@triton.jit
def likelihood(scores, highest):
    """Probability relative to the most likely token's."""
    return tl.where(scores == highest, 1.0, tl.exp(scores - highest))


@triton.jit
def weight_of(scores, highest):
    return (likelihood(scores, highest) * _ONE).to(tl.int64)


@triton.jit
def share_of(weight, part):
    """The least weight that is `part` of `weight`, above 0, so that some token always stays."""
    return tl.maximum(tl.ceil(weight.to(tl.float64) * part).to(tl.int64), 1)


@triton.jit
def is_kept(scores, at, vocab_size, words, row, plan):
    """Return True if the row's threshold (top_k, top_p) and min_p keep a token."""
    highest = tl.load(plan).to(tl.int32).to(tl.float32, bitcast=True)
    min_p = tl.minimum(number(words, row, MIN_P), 1.0)
    return (at < vocab_size) & (rank_of(scores, at) >= tl.load(plan + 7)) & (likelihood(scores, highest) >= min_p)
