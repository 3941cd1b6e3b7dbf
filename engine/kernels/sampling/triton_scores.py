"""Helpers of the sampling kernels: tiles of the vocabulary, a row's words, its adjusted scores and noise.

R rows, V vocabulary, T tiles. Tiles have one size, so a row gives the same bits alone and in a batch.
"""

import triton
import triton.language as tl

from engine.kernels.sampling.words import GENERATED, RowWord

TILE = 4096  # tokens of a program
BLOCK = 1024  # tokens of a tile that are computed together
WARPS = 4

WORDS_PER_ROW = tl.constexpr(len(RowWord))
TEMPERATURE, TOP_K, TOP_P, MIN_P, TYPICAL_P, FILTERED = (
    tl.constexpr(int(RowWord[name])) for name in ("TEMPERATURE", "TOP_K", "TOP_P", "MIN_P", "TYPICAL_P", "FILTERED")
)
_SEED, _POSITION = tl.constexpr(int(RowWord.SEED)), tl.constexpr(int(RowWord.POSITION))
_COUNTS, _REPETITION, _PRESENCE, _FREQUENCY = (
    tl.constexpr(int(word)) for word in (RowWord.COUNTS, RowWord.REPETITION, RowWord.PRESENCE, RowWord.FREQUENCY)
)
_BIAS, _BANNED, _END = (tl.constexpr(int(word)) for word in (RowWord.BIAS, RowWord.BANNED, RowWord.END))
GENERATED_BITS = tl.constexpr(GENERATED)
MAX_NOISE = tl.constexpr(17.0)  # -log(-log(1 - 2**-24)) = 16.6


@triton.jit
def store_winner(partial, num_rows, tiles, row, tile, token_id):
    """`partial` [4, R, T]: best score, the raw logits' maximum, their sum of exponentials, bits of the best token's id."""
    tl.store(partial + (3 * num_rows + row) * tiles + tile, token_id.to(tl.float32, bitcast=True))


@triton.jit
def number(words, row, WORD: tl.constexpr):
    """A float word of the row, as float32."""
    return tl.load(words + row * WORDS_PER_ROW + WORD).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def adjusted(raw, at, words, counts_SV, row, vocab_size, EXTRAS: tl.constexpr):
    """Scores after bias, penalties and bans; NaN, which makes a row unusable, as -infinity."""
    scores = tl.where(raw == raw, raw, float("-inf"))
    if EXTRAS:
        bias_at = tl.load(words + row * WORDS_PER_ROW + _BIAS)
        banned_at = tl.load(words + row * WORDS_PER_ROW + _BANNED)
        end = tl.load(words + row * WORDS_PER_ROW + _END)
        for index in range(bias_at, banned_at):
            entry = tl.load(words + index)
            bias = (entry & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
            scores = tl.where(at == (entry >> 32).to(tl.int32), scores + bias, scores)
        count_row = tl.load(words + row * WORDS_PER_ROW + _COUNTS)
        if count_row >= 0:
            repetition = number(words, row, _REPETITION)
            presence = tl.load(words + row * WORDS_PER_ROW + _PRESENCE).to(tl.float64, bitcast=True)
            frequency = tl.load(words + row * WORDS_PER_ROW + _FREQUENCY).to(tl.float64, bitcast=True)
            seen = tl.load(counts_SV + count_row * vocab_size + at, mask=at < vocab_size, other=0).to(tl.int32)
            generated = seen & GENERATED_BITS
            shrunk = tl.where(scores > 0, tl.div_rn(scores, tl.zeros_like(scores) + repetition), scores * repetition)
            scores = tl.where(seen != 0, shrunk, scores)
            cost = (presence + frequency * generated.to(tl.float64)).to(tl.float32)
            scores = tl.where(generated > 0, scores - cost, scores)
        for index in range(banned_at, end):
            scores = tl.where(at == tl.load(words + index).to(tl.int32), float("-inf"), scores)
    return scores


@triton.jit
def tempered(scores, temperature):
    return tl.div_rn(scores, tl.zeros_like(scores) + tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def minus_noise(words, row, at):
    """log(-log(u)): negative standard Gumbel noise."""
    offset = (tl.load(words + row * WORDS_PER_ROW + _POSITION) << 32) | at.to(tl.int64)
    uniform = tl.rand(tl.load(words + row * WORDS_PER_ROW + _SEED), offset)
    uniform = tl.minimum(tl.maximum(uniform, 1e-10), 1 - 5.9604644775390625e-08)
    return tl.log(-tl.log(uniform))
