"""Sampling of one token for each row of logits. R sampled rows, V vocabulary, P slots of the counts."""

from __future__ import annotations

import torch

from engine.kernels.device import twin
from engine.kernels.sampling.philox import gumbel_noise
from engine.kernels.sampling.typical import leave_typical
from engine.kernels.sampling.words import GENERATED, MAX_VOCAB, RowWord, SampledTokens, SamplingInputs, mask_words


def choose(logits: torch.Tensor, inputs: SamplingInputs, report: torch.Tensor) -> SampledTokens:
    """Sample one token for each row of `logits` [R, V], with any row stride. A row is usable if its maximum is finite.

    `report` [R, 3] int32 is written. The noise of (seed, position, v) is Philox 4x32-10 with key `seed` and counter
    `position << 32 | v`, as `tl.rand` computes it. Of equal scores, the smaller id is the more likely.

    Masks come first and change `logits`.
    """
    if logits.shape[1] > MAX_VOCAB or logits.stride(1) != 1:
        raise ValueError(f"logits of shape {tuple(logits.shape)} with strides {logits.stride()}")
    if inputs.masked:
        mask_rows(logits, inputs)
    return choose_rows(logits, inputs, report)


@twin("engine.kernels.sampling.triton_mask")
def mask_rows(logits: torch.Tensor, inputs: SamplingInputs) -> None:
    """Set masked logits to -infinity in some rows of `logits` [R, V]."""
    vocab_size, width = logits.shape[1], mask_words(logits.shape[1])
    rows = inputs.words[inputs.masked_at : inputs.masked_at + inputs.masked]
    masks = inputs.words[inputs.masks_at : inputs.masks_at + inputs.masked * width].view(-1, width, 1)
    allowed = (masks >> torch.arange(64, device=masks.device) & 1).view(inputs.masked, -1)[:, :vocab_size]
    logits[rows] = logits[rows].masked_fill(allowed == 0, float("-inf"))


@twin("engine.kernels.sampling.triton_choose")
def choose_rows(logits: torch.Tensor, inputs: SamplingInputs, report: torch.Tensor) -> SampledTokens:
    """`choose` for checked logits. The plain version sorts row by row."""
    raw = logits.float()
    token_ids = torch.empty(len(raw), dtype=torch.int64, device=raw.device)
    for row, scores in enumerate(raw):
        if not (inputs.random or inputs.extras):
            token_ids[row] = scores.argmax()
            continue
        words = inputs.words[row * len(RowWord) : (row + 1) * len(RowWord)]
        token_ids[row] = _choose_one(_adjusted(scores, words, inputs), words)
    normalizer = raw.logsumexp(dim=-1)
    report[:, 0] = raw.amax(dim=-1).isfinite()
    report[:, 1] = token_ids
    report[:, 2] = (raw.gather(1, token_ids[:, None])[:, 0] - normalizer).view(torch.int32)
    return SampledTokens(token_ids, report, normalizer)


def _adjusted(scores: torch.Tensor, words: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """[V] scores after bias, penalties and bans."""
    repetition, presence, frequency = words.view(torch.float64)[RowWord.REPETITION : RowWord.FREQUENCY + 1]
    bias_at, banned_at, end = words[RowWord.BIAS : RowWord.END + 1].tolist()
    scores = scores.clone()
    bias = inputs.words[bias_at:banned_at]
    scores[bias >> 32] += bias.int().view(torch.float32)
    if inputs.counts is not None and words[RowWord.COUNTS] >= 0:
        seen = inputs.counts[words[RowWord.COUNTS]]
        generated = (seen & GENERATED).double()
        penalized = torch.where(scores > 0, scores / repetition.float(), scores * repetition.float())
        scores = torch.where(seen != 0, penalized, scores)
        scores = torch.where(generated > 0, scores - (presence + frequency * generated).float(), scores)
    scores[inputs.words[banned_at:end]] = float("-inf")
    return scores


def _choose_one(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    temperature, top_p, min_p = words.view(torch.float64)[[RowWord.TEMPERATURE, RowWord.TOP_P, RowWord.MIN_P]]
    if not temperature:
        return scores.argmax()
    scores = scores / temperature.float()
    if words[RowWord.FILTERED]:
        ordered, order = scores.sort(descending=True, stable=True)
        weights = (ordered - ordered[0]).exp()
        weights[words[RowWord.TOP_K] :] = 0.0
        before = weights.double().cumsum(0) - weights.double()
        kept = (weights > 0) & (weights >= min_p.float()) & ((before < top_p * weights.double().sum()) | (top_p >= 1))
        kept[0] = True
        scores = torch.full_like(scores, float("-inf")).scatter_(0, order[kept], ordered[kept])
        typical_p = words.view(torch.float64)[RowWord.TYPICAL_P]
        scores = leave_typical(scores[None], typical_p[None, None])[0] if typical_p < 1 else scores
    noise = gumbel_noise(words[RowWord.SEED, None], words[RowWord.POSITION, None], len(scores))
    return (scores + noise[0]).argmax()


@twin("engine.kernels.sampling.triton_choose")
def count_tokens(counts: torch.Tensor, places: torch.Tensor, newest: torch.Tensor) -> None:
    """Count one more generated token in some rows of `counts` [S, V].

    `places` [P, 2] int64: where a row starts in a flat `counts`, and the token; a negative one is at -1 - token in `newest`.
    """
    flat = counts.view(-1)
    for start, token in places.tolist():
        at = start + (token if token >= 0 else int(newest[-1 - token]))
        flat[at] += int(flat[at]) & GENERATED != GENERATED  # saturates
