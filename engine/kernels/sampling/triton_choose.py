"""Triton version of `choose`: each tile of the vocabulary gives its best token, the last kernel picks one of them.

R rows, V vocabulary, T tiles.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel
from engine.kernels.sampling.triton_filter import draw_filtered
from engine.kernels.sampling.triton_scores import (
    BLOCK,
    FILTERED,
    GENERATED_BITS,
    MAX_NOISE,
    TEMPERATURE,
    TILE,
    WARPS,
    WORDS_PER_ROW,
    adjusted,
    minus_noise,
    number,
    store_winner,
    tempered,
)
from engine.kernels.sampling.words import SampledTokens, SamplingInputs


def choose_rows(logits: torch.Tensor, inputs: SamplingInputs, report: torch.Tensor) -> SampledTokens:
    num_rows, vocab_size = logits.shape
    row_stride, tiles, device = logits.stride(0), -(-vocab_size // TILE), logits.device
    partial = torch.empty((4, num_rows, tiles), dtype=torch.float32, device=device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    normalizer = torch.empty(num_rows, dtype=torch.float32, device=device) if inputs.logprobs else None
    counts = logits if inputs.counts is None else inputs.counts
    # All other tensors start at allocations, so they are aligned.
    variant = (device, logits.dtype, logits.data_ptr() % 16, row_stride, vocab_size, inputs.counts is None)
    flags = (inputs.random, inputs.extras, inputs.logprobs)
    _SURVEY.launch(
        (num_rows, tiles), (variant, flags),
        logits, inputs.words, counts, partial, vocab_size, row_stride, num_rows, tiles, TILE, BLOCK, *flags,
    )  # fmt: skip
    if inputs.filtered:
        draw_filtered(logits, inputs, counts, partial, variant)
    _PICK.launch(
        (num_rows,), (variant, inputs.logprobs),
        logits, partial, token_ids, report, partial if normalizer is None else normalizer, row_stride, num_rows, tiles,
        triton.next_power_of_2(tiles), inputs.logprobs,
    )  # fmt: skip
    return SampledTokens(token_ids, report, normalizer)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _survey(
    logits_RV, words, counts_SV, partial, vocab_size, row_stride, num_rows, tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr, RANDOM: tl.constexpr, EXTRAS: tl.constexpr, LOGPROBS: tl.constexpr,
):  # fmt: skip
    """One tile of a row: its best token and the raw logits' range. Noise is added unless the row is greedy or filtered."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    winner = tile * TILE + lanes
    extent = tl.full((BLOCK,), float("-inf"), tl.float32)
    bound = float("-inf")
    raw_max = float("-inf")
    raw_sum = 0.0
    if RANDOM:
        temperature = number(words, row, TEMPERATURE)
        noisy = (temperature > 0) & (tl.load(words + row * WORDS_PER_ROW + FILTERED) == 0)
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
                if tl.max(scores, axis=0) + MAX_NOISE > bound:
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
    tl.store(at, (seen + ((seen & GENERATED_BITS) != GENERATED_BITS).to(tl.int32)).to(tl.int16))


_COUNT = Kernel(_count, num_warps=1)
_SURVEY = Kernel(_survey, num_warps=WARPS, enable_fp_fusion=False)
_PICK = Kernel(_pick, num_warps=1)
