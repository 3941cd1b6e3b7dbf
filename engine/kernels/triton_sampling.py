"""Triton version of `sampling`: the vocabulary is cut into tiles, each gives its best token, the last kernel picks among them.

R rows, V vocabulary, T tiles. A tile is always the same size, so that a row gives the same bits alone and in a batch.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel
from engine.kernels.sampling import GENERATED, Choice, Chosen, Word

TILE = 4096
BLOCK = 1024  # of a tile, at a time
WARPS = 4

_WIDTH = tl.constexpr(len(Word))
_TEMPERATURE, _SEED, _POSITION = (tl.constexpr(int(word)) for word in (Word.TEMPERATURE, Word.SEED, Word.POSITION))
_COUNTS, _REPETITION, _PRESENCE, _FREQUENCY = (
    tl.constexpr(int(word)) for word in (Word.COUNTS, Word.REPETITION, Word.PRESENCE, Word.FREQUENCY)
)
_BIAS, _BANNED, _END, _FILTERED = (
    tl.constexpr(int(word)) for word in (Word.BIAS, Word.BANNED, Word.END, Word.FILTERED)
)
_GENERATED = tl.constexpr(GENERATED)
_MOST_NOISE = tl.constexpr(17.0)  # -log(-log(1 - 2**-24)) = 16.6


def choose(logits: torch.Tensor, choice: Choice, report: torch.Tensor) -> Chosen:
    from engine.kernels.triton_filter import draw_filtered

    num_rows, vocab_size = logits.shape
    row_stride, tiles, device = logits.stride(0), -(-vocab_size // TILE), logits.device
    partial = torch.empty((4, num_rows, tiles), dtype=torch.float32, device=device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    normalizer = torch.empty(num_rows, dtype=torch.float32, device=device) if choice.logprobs else None
    counts = logits if choice.counts is None else choice.counts
    # every other tensor begins where its memory was allocated: aligned
    variant = (device, logits.dtype, logits.data_ptr() % 16, row_stride, vocab_size, choice.counts is None)
    flags = (choice.random, choice.extras, choice.logprobs)
    _SURVEY.launch(
        (num_rows, tiles), (variant, flags),
        logits, choice.words, counts, partial, vocab_size, row_stride, num_rows, tiles, TILE, BLOCK, *flags,
    )  # fmt: skip
    if choice.filtered:
        draw_filtered(logits, choice, counts, partial, variant)
    _PICK.launch(
        (num_rows,), (variant, choice.logprobs),
        logits, partial, token_ids, report, partial if normalizer is None else normalizer, row_stride, num_rows, tiles,
        triton.next_power_of_2(tiles), choice.logprobs,
    )  # fmt: skip
    return Chosen(token_ids, report, normalizer)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _survey(
    logits_RV, words, counts_SV, partial, vocab_size, row_stride, num_rows, tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr, RANDOM: tl.constexpr, EXTRAS: tl.constexpr, LOGPROBS: tl.constexpr,
):  # fmt: skip
    """One tile of one row: its best token (with noise, unless the row is greedy or filtered) and the raw logits' extent."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    winner = tile * TILE + lanes
    extent = tl.full((BLOCK,), float("-inf"), tl.float32)
    bound = float("-inf")
    raw_max = float("-inf")
    raw_sum = 0.0
    if RANDOM:
        temperature = number(words, row, _TEMPERATURE)
        noisy = (temperature > 0) & (tl.load(words + row * _WIDTH + _FILTERED) == 0)
    for step in tl.static_range(TILE // BLOCK):
        at = tile * TILE + step * BLOCK + lanes
        inside = at < vocab_size
        raw = tl.load(logits_RV + row * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
        extent = tl.maximum(extent, tl.where(raw == raw, raw, float("inf")))
        if LOGPROBS:
            highest = tl.maximum(raw_max, tl.max(tl.where(raw == raw, raw, float("inf")), axis=0))
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            raw_sum = raw_sum * tl.exp(raw_max - shift) + tl.sum(tl.exp(raw - shift), axis=0)
            raw_max = highest
        scores = adjusted(raw, at, words, counts_SV, row, vocab_size, EXTRAS)
        if RANDOM:
            scores = tempered(scores, temperature)
            if noisy:
                if tl.max(scores, axis=0) + _MOST_NOISE > bound:
                    scores -= minus_noise(words, row, at)
                    bound = tl.maximum(bound, tl.max(tl.where(inside, scores, float("-inf")), axis=0))
                else:
                    scores = tl.full((BLOCK,), float("-inf"), tl.float32)
        better = inside & (scores > best)
        best = tl.where(better, scores, best)
        winner = tl.where(better, at, winner)
    top = tl.max(best, axis=0)
    tl.store(partial + row * tiles + tile, top)
    store_winner(partial, num_rows, tiles, row, tile, tl.min(tl.where(best == top, winner, 0x7FFFFFFF), axis=0))
    tl.store(partial + (num_rows + row) * tiles + tile, tl.max(extent, axis=0))
    if LOGPROBS:
        tl.store(partial + (2 * num_rows + row) * tiles + tile, raw_sum)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _pick(
    logits_RV, partial, token_ids_R, report_R3, normalizer_R, row_stride, num_rows, tiles,
    TILES: tl.constexpr, LOGPROBS: tl.constexpr,
):  # fmt: skip
    """The best of a row's tiles."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    best = tl.load(partial + row * tiles + tile, mask=inside, other=float("-inf"))
    winner = tl.load(partial + (3 * num_rows + row) * tiles + tile, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    token_id = tl.min(tl.where(inside & (best == tl.max(best, axis=0)), winner, 0x7FFFFFFF), axis=0)
    extents = tl.load(partial + (num_rows + row) * tiles + tile, mask=inside, other=float("-inf"))
    highest = tl.max(extents, axis=0)
    usable = (highest > float("-inf")) & (highest < float("inf"))
    tl.store(token_ids_R + row, token_id.to(tl.int64))
    tl.store(report_R3 + row * 3, usable.to(tl.int32))
    tl.store(report_R3 + row * 3 + 1, token_id)
    if LOGPROBS:
        sums = tl.load(partial + (2 * num_rows + row) * tiles + tile, mask=inside, other=0.0)
        shift = tl.where(usable, highest, 0.0)
        normalizer = shift + tl.log(tl.sum(sums * tl.exp(extents - shift), axis=0))
        raw = tl.load(logits_RV + row * row_stride + token_id).to(tl.float32)
        tl.store(report_R3 + row * 3 + 2, (raw - normalizer).to(tl.int32, bitcast=True))
        tl.store(normalizer_R + row, normalizer)


@triton.jit
def store_winner(partial, num_rows, tiles, row, tile, token_id):
    """`partial` [4, R, T]: best score, the raw logits' maximum, their sum of exponentials, bits of the best token's id."""
    tl.store(partial + (3 * num_rows + row) * tiles + tile, token_id.to(tl.float32, bitcast=True))


@triton.jit
def number(words, row, WORD: tl.constexpr):
    """A float word of the row, as float32."""
    return tl.load(words + row * _WIDTH + WORD).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def adjusted(raw, at, words, counts_SV, row, vocab_size, EXTRAS: tl.constexpr):
    """Scores after bias, penalties and bans; NaN, which makes a row unusable, as -infinity."""
    scores = tl.where(raw == raw, raw, float("-inf"))
    if EXTRAS:
        bias_at = tl.load(words + row * _WIDTH + _BIAS)
        banned_at = tl.load(words + row * _WIDTH + _BANNED)
        end = tl.load(words + row * _WIDTH + _END)
        for index in range(bias_at, banned_at):
            entry = tl.load(words + index)
            bias = (entry & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
            scores = tl.where(at == (entry >> 32).to(tl.int32), scores + bias, scores)
        line = tl.load(words + row * _WIDTH + _COUNTS)
        if line >= 0:
            repetition = number(words, row, _REPETITION)
            presence = tl.load(words + row * _WIDTH + _PRESENCE).to(tl.float64, bitcast=True)
            frequency = tl.load(words + row * _WIDTH + _FREQUENCY).to(tl.float64, bitcast=True)
            seen = tl.load(counts_SV + line * vocab_size + at, mask=at < vocab_size, other=0).to(tl.int32)
            generated = seen & _GENERATED
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
    """log(-log(u)): standard Gumbel noise with its sign turned."""
    offset = (tl.load(words + row * _WIDTH + _POSITION) << 32) | at.to(tl.int64)
    uniform = tl.rand(tl.load(words + row * _WIDTH + _SEED), offset)
    uniform = tl.minimum(tl.maximum(uniform, 1e-10), 1 - 5.9604644775390625e-08)
    return tl.log(-tl.log(uniform))


def count_tokens(counts: torch.Tensor, places: torch.Tensor, newest: torch.Tensor) -> None:
    variant = (counts.device, places.data_ptr() % 16)
    _COUNT.launch((len(places),), variant, counts, places, newest)


@triton.jit
def _count(counts_SV, places_P2, newest_R):
    place = tl.program_id(0)
    token = tl.load(places_P2 + 2 * place + 1)
    if token < 0:
        token = tl.load(newest_R - 1 - token)
    at = counts_SV + tl.load(places_P2 + 2 * place) + token
    seen = tl.load(at).to(tl.int32)
    tl.store(at, (seen + ((seen & _GENERATED) != _GENERATED).to(tl.int32)).to(tl.int16))


_COUNT = Kernel(_count, num_warps=1)
_SURVEY = Kernel(_survey, num_warps=WARPS, enable_fp_fusion=False)
_PICK = Kernel(_pick, num_warps=1)


def gumbel_argmax(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    scores = scores.contiguous()
    num_rows, vocab_size = scores.shape
    tiles = triton.cdiv(vocab_size, BLOCK)
    best = torch.empty((num_rows, tiles), dtype=torch.float32, device=scores.device)
    winner = torch.empty((num_rows, tiles), dtype=torch.int64, device=scores.device)
    _DRAW.launch((num_rows, tiles), None, scores, seeds, positions, best, winner, vocab_size, tiles, TILE=BLOCK)
    return winner.gather(1, best.argmax(dim=1, keepdim=True))[:, 0]


@triton.jit
def _draw(scores_RV, seeds_R, positions_R, best, winner, vocab_size, tiles, TILE: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    inside = at < vocab_size
    offset = (tl.load(positions_R + row) << 32) | at.to(tl.int64)
    uniform = tl.rand(tl.load(seeds_R + row), offset)
    uniform = tl.minimum(tl.maximum(uniform, 1e-10), 1 - 5.9604644775390625e-08)
    noisy = tl.load(scores_RV + row * vocab_size + at, mask=inside, other=float("-inf")) - tl.log(-tl.log(uniform))
    noisy = tl.where(inside, noisy, float("-inf"))
    tl.store(best + row * tiles + tile, tl.max(noisy, axis=0))
    tl.store(winner + row * tiles + tile, tile * TILE + tl.argmax(noisy, axis=0))


_DRAW = Kernel(_draw)
