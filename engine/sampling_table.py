"""Every living sequence's sampling parameters as words for the device, packed once: a pass picks its rows with numpy."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from common.messages import SamplingParams
from engine.kernels.sampling import Word
from engine.sequence import Sequence
from engine.staging import Words

_MIN_TEMPERATURE = 1e-5  # as in engine.sampler
_NOTHING = np.zeros(0, dtype=np.int64)


class Needs(IntFlag):
    """What a row asks for beyond the most likely token."""

    RANDOM = 1
    FILTERS = 2
    BIAS = 4
    PENALTIES = 8
    LOGPROBS = 16


class Trait(IntEnum):
    """What the host looks at: columns of `SamplingTable.traits`."""

    NEEDS = 0
    NUM_PROMPT_TOKENS = 1
    MIN_TOKENS = 2  # 0 if nothing is banned before


@dataclass(frozen=True, slots=True)
class Lists:
    """A row's words of variable number."""

    bias: Words
    banned: Words


class SamplingTable:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._entries: dict[int, int] = {}  # id of a sequence -> row of the arrays
        self._dead: deque[int] = deque()  # ids of sequences that are gone, by whatever thread dropped them
        self._free: list[int] = []
        self.words = np.zeros((0, len(Word)), dtype=np.int64)
        self.traits = np.zeros((0, len(Trait)), dtype=np.int64)
        self.lists: list[Lists] = []

    def rows(self, sequences: SequenceOf[Sequence]) -> npt.NDArray[np.intp]:
        """Return each sequence's row of `words`, `traits` and `lists`."""
        while self._dead:  # before any look-up: a new sequence may have the id of a dead one
            self._free.append(self._entries.pop(self._dead.popleft()))
        entries = self._entries
        try:
            return np.array([entries[id(sequence)] for sequence in sequences], dtype=np.intp)
        except KeyError:
            return np.array([self._row(sequence) for sequence in sequences])

    def _row(self, sequence: Sequence) -> int:
        row = self._entries.get(id(sequence))
        if row is None:
            if not self._free:
                self._grow()
            row = self._entries[id(sequence)] = self._free.pop()
            weakref.finalize(sequence, self._dead.append, id(sequence)).atexit = False
            params = sequence.sampling
            self.words[row] = _words(params, self._vocab_size)
            self.lists[row] = lists = _lists(params, self._vocab_size)
            min_tokens = params.min_tokens if lists.banned.size else 0
            self.traits[row] = (_needs(params, lists), sequence.num_prompt_tokens, min_tokens)
        return row

    def _grow(self) -> None:
        more = max(64, len(self.words))
        self._free.extend(range(len(self.words), len(self.words) + more))
        self.words = np.concatenate((self.words, np.zeros((more, len(Word)), dtype=np.int64)))
        self.traits = np.concatenate((self.traits, np.zeros((more, len(Trait)), dtype=np.int64)))
        self.lists += [Lists(_NOTHING, _NOTHING)] * more


def _words(params: SamplingParams, vocab_size: int) -> Words:
    words = np.zeros(len(Word), dtype=np.int64)
    numbers = words.view(np.float64)
    random = params.temperature > 0
    numbers[Word.TEMPERATURE] = max(params.temperature, _MIN_TEMPERATURE) if random else 0.0
    words[Word.TOP_K] = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    numbers[Word.TOP_P] = params.top_p
    numbers[Word.MIN_P] = params.min_p
    seed = params.seed & (1 << 64) - 1
    words[Word.SEED] = seed - (1 << 64) if seed >> 63 else seed
    words[Word.COUNTS] = -1
    numbers[Word.REPETITION] = params.repetition_penalty
    numbers[Word.PRESENCE] = params.presence_penalty
    numbers[Word.FREQUENCY] = params.frequency_penalty
    words[Word.FILTERED] = random and _filters(params)
    return words


def _lists(params: SamplingParams, vocab_size: int) -> Lists:
    bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
    bits = np.array(list(bias.values()), dtype=np.float32).view(np.uint32).astype(np.int64)
    banned = [token for token in dict.fromkeys(params.stop_token_ids) if 0 <= token < vocab_size]
    return Lists(np.array(list(bias), dtype=np.int64) << 32 | bits, np.array(banned, dtype=np.int64))


def _needs(params: SamplingParams, lists: Lists) -> Needs:
    needs = Needs(0)
    if params.temperature > 0:
        needs |= Needs.RANDOM
        if _filters(params):
            needs |= Needs.FILTERS
    if lists.bias.size:
        needs |= Needs.BIAS
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        needs |= Needs.PENALTIES
    if params.logprobs is not None:
        needs |= Needs.LOGPROBS
    return needs


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
