"""The sampling parameters of live sequences as words for the device, packed once: a pass gathers rows with numpy.

A new way to change scores joins here: a `Feature`, so that passes without it pay nothing, and words of a row
(`kernels.sampling.RowWord`) or a list that the row points into (`RowLists`). What changes with each pass, as a grammar's
mask does, comes with the pass.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from common.messages import SamplingParams
from engine.arrays import Longs
from engine.kernels.sampling import RowWord
from engine.sampling.host import MIN_TEMPERATURE, as_int64, has_filters
from engine.sequence import Sequence

_NO_WORDS = np.zeros(0, dtype=np.int64)


class Feature(IntFlag):
    """A request for more than greedy sampling."""

    RANDOM = 1
    FILTERS = 2
    BIAS = 4
    PENALTIES = 8
    LOGPROBS = 16
    TYPICAL = 32


class RowFact(IntEnum):
    """A fact about a row for the host: columns of `SamplingTable.facts`."""

    FEATURES = 0
    NUM_PROMPT_TOKENS = 1
    MIN_TOKENS = 2  # stop tokens are banned before; 0 if none


@dataclass(frozen=True, slots=True)
class RowLists:
    """A row's words of variable number."""

    bias: Longs
    banned: Longs


class SamplingTable:
    """A row for each live sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, int] = {}  # id of a sequence -> row of the arrays
        self._dead: deque[int] = deque()  # ids of dropped sequences; any thread may append
        self._free: list[int] = []
        self.words = np.zeros((0, len(RowWord)), dtype=np.int64)
        self.facts = np.zeros((0, len(RowFact)), dtype=np.int64)
        self.lists: list[RowLists] = []

    def rows(self, sequences: SequenceOf[Sequence]) -> npt.NDArray[np.intp]:
        """Return each sequence's row of `words`, `facts` and `lists`."""
        while self._dead:  # first: a new sequence may reuse the id of a dead one
            self._free.append(self._rows.pop(self._dead.popleft()))
        rows = self._rows
        try:
            return np.array([rows[id(sequence)] for sequence in sequences], dtype=np.intp)
        except KeyError:
            return np.array([self._row(sequence) for sequence in sequences])

    def _row(self, sequence: Sequence) -> int:
        row = self._rows.get(id(sequence))
        if row is None:
            if not self._free:
                self._grow()
            row = self._rows[id(sequence)] = self._free.pop()
            weakref.finalize(sequence, self._dead.append, id(sequence)).atexit = False
            params = sequence.sampling
            self.words[row] = _words_of(params, self._vocab_size)
            self.lists[row] = lists = _lists_of(params, self._vocab_size)
            min_tokens = params.min_tokens if lists.banned.size else 0
            self.facts[row] = (_features_of(params, lists), sequence.num_prompt_tokens, min_tokens)
        return row

    def _grow(self) -> None:
        more = max(64, len(self.words))
        self._free.extend(range(len(self.words), len(self.words) + more))
        self.words = np.concatenate((self.words, np.zeros((more, len(RowWord)), dtype=np.int64)))
        self.facts = np.concatenate((self.facts, np.zeros((more, len(RowFact)), dtype=np.int64)))
        self.lists += [RowLists(_NO_WORDS, _NO_WORDS)] * more


def _words_of(params: SamplingParams, vocab_size: int) -> Longs:
    words = np.zeros(len(RowWord), dtype=np.int64)
    numbers = words.view(np.float64)
    random = params.temperature > 0
    numbers[RowWord.TEMPERATURE] = max(params.temperature, MIN_TEMPERATURE) if random else 0.0
    words[RowWord.TOP_K] = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    numbers[RowWord.TOP_P] = params.top_p
    numbers[RowWord.MIN_P] = params.min_p
    numbers[RowWord.TYPICAL_P] = params.typical_p
    words[RowWord.SEED] = as_int64(params.seed)
    words[RowWord.COUNTS] = -1
    numbers[RowWord.REPETITION] = params.repetition_penalty
    numbers[RowWord.PRESENCE] = params.presence_penalty
    numbers[RowWord.FREQUENCY] = params.frequency_penalty
    words[RowWord.FILTERED] = random and has_filters(params)
    return words


def _lists_of(params: SamplingParams, vocab_size: int) -> RowLists:
    bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
    bits = np.array(list(bias.values()), dtype=np.float32).view(np.uint32).astype(np.int64)
    banned = [token for token in dict.fromkeys(params.stop_token_ids) if 0 <= token < vocab_size]
    return RowLists(np.array(list(bias), dtype=np.int64) << 32 | bits, np.array(banned, dtype=np.int64))


def _features_of(params: SamplingParams, lists: RowLists) -> Feature:
    features = Feature(0)
    if params.temperature > 0:
        features |= Feature.RANDOM
        if has_filters(params):
            features |= Feature.FILTERS
        if params.typical_p < 1.0:
            features |= Feature.TYPICAL
    if lists.bias.size:
        features |= Feature.BIAS
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        features |= Feature.PENALTIES
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
    return features
