"""The choice of tokens on the device, without a sort and without the host. R sampled rows, V vocabulary.

Everything that the host says about a pass is one tensor of 64-bit `words`: first `len(Word)` words for each row, then lists
that the rows' words point into. Where token counts are needed, `counts` [S, V] int16 holds one line for each sequence with
penalties: 0 = not seen, low 15 bits = times generated, sign bit = in the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from engine.kernels.backend import use_triton
from engine.philox import gumbel_noise

GENERATED = 0x7FFF  # the bits of a token's count that say how often it was generated
MAX_VOCAB = 1 << 20  # a token id takes 20 bits where scores are ordered


class Word(IntEnum):
    """The words of one row. "f": the bits of a float64."""

    TEMPERATURE = 0  # f; 0 = greedy
    TOP_K = 1  # at least V = off
    TOP_P = 2  # f; 1 = off
    MIN_P = 3  # f; 0 = off
    SEED = 4
    POSITION = 5
    COUNTS = 6  # line of `counts`; -1 = no penalties
    REPETITION = 7  # f
    PRESENCE = 8  # f
    FREQUENCY = 9  # f
    BIAS = 10  # index of the row's first bias word: id << 32 | bits of a float32
    BANNED = 11  # index of its first banned id; its bias ends here
    END = 12  # index behind its last banned id
    FILTERED = 13  # 1 = drawn at random, with top_k, top_p or min_p


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a pass asks for. The flags say what no row needs, so that a kernel can leave it out."""

    words: torch.Tensor  # int64, on the device; the rows' words are missing if all are greedy without extras
    counts: torch.Tensor | None  # [S, V] int16
    filtered: int  # rows with filters
    filtered_at: int  # index in `words` of their row numbers
    random: bool  # some row has a temperature
    extras: bool  # some row has bias, bans or penalties
    logprobs: bool  # the chosen tokens' log probabilities are wanted


@dataclass(frozen=True, slots=True)
class Chosen:
    token_ids: torch.Tensor  # [R] int64, always inside the vocabulary
    report: torch.Tensor  # [R, 3] int32: whether the row was usable, token id, bits of its log probability (float32)
    normalizer: torch.Tensor | None  # [R] float32: logsumexp of the raw logits, if log probabilities are wanted


def choose(logits: torch.Tensor, choice: Choice, report: torch.Tensor) -> Chosen:
    """Choose one token for each row of `logits` [R, V], whose rows may lie apart. A row is usable if its maximum is finite.

    `report` [R, 3] int32 is written. The noise of (seed, position, v) is Philox 4x32-10 with key `seed` and counter
    `position << 32 | v`, as `tl.rand` computes it. Equal scores: the smaller id is the more likely token.
    """
    if logits.shape[1] > MAX_VOCAB or logits.stride(1) != 1:
        raise ValueError(f"logits of shape {tuple(logits.shape)} with strides {logits.stride()}")
    if use_triton(logits):
        from engine.kernels.triton_sampling import choose as kernel

        return kernel(logits, choice, report)
    return reference_choose(logits, choice, report)


def reference_choose(logits: torch.Tensor, choice: Choice, report: torch.Tensor) -> Chosen:
    """The twin of `choose`: row by row, with a sort."""
    raw = logits.float()
    token_ids = torch.empty(len(raw), dtype=torch.int64, device=raw.device)
    for row, scores in enumerate(raw):
        if not (choice.random or choice.extras):
            token_ids[row] = scores.argmax()
            continue
        words = choice.words[row * len(Word) : (row + 1) * len(Word)]
        token_ids[row] = _choose_one(_adjusted(scores, words, choice), words)
    normalizer = raw.logsumexp(dim=-1)
    report[:, 0] = raw.amax(dim=-1).isfinite()
    report[:, 1] = token_ids
    report[:, 2] = (raw.gather(1, token_ids[:, None])[:, 0] - normalizer).view(torch.int32)
    return Chosen(token_ids, report, normalizer)


def _adjusted(scores: torch.Tensor, words: torch.Tensor, choice: Choice) -> torch.Tensor:
    """[V] scores after bias, penalties and bans."""
    repetition, presence, frequency = words.view(torch.float64)[Word.REPETITION : Word.FREQUENCY + 1]
    bias_at, banned_at, end = words[Word.BIAS : Word.END + 1].tolist()
    scores = scores.clone()
    bias = choice.words[bias_at:banned_at]
    scores[bias >> 32] += bias.int().view(torch.float32)
    if choice.counts is not None and words[Word.COUNTS] >= 0:
        seen = choice.counts[words[Word.COUNTS]]
        generated = (seen & GENERATED).double()
        penalized = torch.where(scores > 0, scores / repetition.float(), scores * repetition.float())
        scores = torch.where(seen != 0, penalized, scores)
        scores = torch.where(generated > 0, scores - (presence + frequency * generated).float(), scores)
    scores[choice.words[banned_at:end]] = float("-inf")
    return scores


def _choose_one(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    temperature, top_p, min_p = words.view(torch.float64)[[Word.TEMPERATURE, Word.TOP_P, Word.MIN_P]]
    if not temperature:
        return scores.argmax()
    scores = scores / temperature.float()
    if words[Word.FILTERED]:
        ordered, order = scores.sort(descending=True, stable=True)
        weights = (ordered - ordered[0]).exp()
        weights[words[Word.TOP_K] :] = 0.0
        before = weights.double().cumsum(0) - weights.double()
        kept = (weights > 0) & (weights >= min_p.float()) & ((before < top_p * weights.double().sum()) | (top_p >= 1))
        kept[0] = True
        scores = torch.full_like(scores, float("-inf")).scatter_(0, order[kept], ordered[kept])
    noise = gumbel_noise(words[Word.SEED, None], words[Word.POSITION, None], len(scores))
    return (scores + noise[0]).argmax()


def count_tokens(counts: torch.Tensor, places: torch.Tensor, newest: torch.Tensor) -> None:
    """Count one more generated token in each of some lines of `counts` [S, V].

    `places` [P, 2] int64: where a line starts, in a flat `counts`, and the token; a negative one is at -1 - token in `newest`.
    """
    if use_triton(counts):
        from engine.kernels.triton_sampling import count_tokens as kernel

        kernel(counts, places, newest)
    else:
        reference_count_tokens(counts, places, newest)


def reference_count_tokens(counts: torch.Tensor, places: torch.Tensor, newest: torch.Tensor) -> None:
    """The twin of `count_tokens`."""
    flat = counts.view(-1)
    for start, token in places.tolist():
        at = start + (token if token >= 0 else int(newest[-1 - token]))
        flat[at] += int(flat[at]) & GENERATED != GENERATED  # stays at the most


def gumbel_argmax(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return argmax_v(scores + Gumbel noise) [R] int64 for `scores` [R, V] float32, `seeds` and `positions` [R] int64.

    The noise of (seed, position, v) is Philox 4x32-10 with key `seed` and counter `position << 32 | v`, as `tl.rand` computes it.
    """
    if use_triton(scores):
        from engine.kernels.triton_sampling import gumbel_argmax as kernel

        return kernel(scores, seeds, positions)
    return reference(scores, seeds, positions)


def reference(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The twin of `gumbel_argmax`."""
    return (scores + gumbel_noise(seeds, positions, scores.shape[1])).argmax(dim=-1)
