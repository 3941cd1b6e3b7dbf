"""The inputs and results of sampling a pass's rows. R sampled rows, V vocabulary.

Inputs are one tensor of 64-bit `words`: first `len(RowWord)` words for each row, then lists that the rows' words point into.
`counts` [S, V] int16 has one row for each sequence with penalties: 0 = not seen, low 15 bits = times generated, sign bit =
in the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

GENERATED = 0x7FFF  # bits of a count: how often the token was generated
MAX_VOCAB = 1 << 20  # ranks keep 20 bits for a token id


class RowWord(IntEnum):
    """The words of one row. "f": the bits of a float64."""

    TEMPERATURE = 0  # f; 0 = greedy
    TOP_K = 1  # at least V = off
    TOP_P = 2  # f; 1 = off
    MIN_P = 3  # f; 0 = off
    SEED = 4
    POSITION = 5
    COUNTS = 6  # row of `counts`; -1 = no penalties
    REPETITION = 7  # f
    PRESENCE = 8  # f
    FREQUENCY = 9  # f
    BIAS = 10  # index of its first bias word: id << 32 | float32 bits
    BANNED = 11  # index of its first banned id; its bias ends here
    END = 12  # index after its last banned id
    FILTERED = 13  # 1 = drawn at random, with top_k, top_p, min_p or typical_p
    TYPICAL_P = 14  # f; 1 = off


def mask_words(vocab_size: int) -> int:
    """64-bit words of a row's mask."""
    return -(-vocab_size // 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """The sampling parameters of a pass. Flags let kernels skip features that no row needs."""

    words: torch.Tensor  # int64, on the device; empty if all rows are greedy without extras
    counts: torch.Tensor | None  # [S, V] int16
    filtered: int  # rows with filters
    filtered_at: int  # index in `words` of their row numbers
    random: bool  # some row has a temperature
    extras: bool  # some row has bias, bans or penalties
    logprobs: bool  # log probabilities of the sampled tokens are wanted
    typical: bool = False  # some filtered row has typical_p
    masked: int = 0  # rows with a mask
    masked_at: int = 0  # index in `words` of their row numbers
    masks_at: int = 0  # index of the first mask, V / 64 words each


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A pass's sampled tokens, on the device."""

    token_ids: torch.Tensor  # [R] int64, always within the vocabulary
    report: torch.Tensor  # [R, 3] int32: usable, token id, log probability's bits
    normalizer: torch.Tensor | None  # [R] float32: logsumexp of the raw logits, if logprobs are wanted
