"""An append-only text of tokens, indexed for the occurrences of its own and other texts' suffixes.

Hash chains as in LZ77: for each of two n-gram lengths, a table from an n-gram's hash to the newest place where it occurred, and
for each place the one before. A place is the number of tokens before it. It is indexed when the token behind it is known, so each
occurrence has a continuation, and a text's end does not find itself. Memory: 4 bytes a token for the text, and for each n-gram
length 4 bytes a token and 4 to 8 a token of `capacity`: 20 to 28 bytes a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from decode.drafts.settings import MatchLengths

END = -1  # ends a text of several; no token
COARSE = 8  # tokens of longer n-grams, which find long matches among many short ones
MOST_VISITED = 64  # places of a chain that a lookup visits, newest first
MOST_FOUND = 16  # occurrences that a lookup returns, newest first
FEW = 16  # tokens that are indexed one by one
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Tokens: TypeAlias = "array[int]"  # signed 32-bit numbers


@dataclass(frozen=True, slots=True)
class Suffix:
    """The end of a text, as far as a match may reach, and its keys."""

    tokens: Tokens
    keys: tuple[int, ...]  # hashes of its n-grams, the shorter first


@dataclass(frozen=True, slots=True)
class Found:
    """The occurrences of the longest suffix that occurred: its length, and the places behind it, newest first."""

    length: int
    places: list[int]


NOTHING = Found(0, [])


class Occurrences:
    """The text and its index; `capacity` is the number of tokens that it is made for, and no limit."""

    def __init__(self, lengths: MatchLengths, *, capacity: int) -> None:
        self._lengths = lengths
        sizes = [lengths.least, COARSE] if lengths.least < COARSE <= lengths.most else [lengths.least]
        self._grams = [_Grams(size, capacity=capacity) for size in sizes]
        self.text: Tokens = array("i")

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: ListOf[int]) -> None:
        """Append tokens: about 1 µs a token for a few, 0.1 µs for many."""
        if len(tokens) > FEW:
            self._extend_by_many(np.asarray(tokens, dtype=np.int64))
            return
        for token in tokens:
            place = len(self.text)
            for grams in self._grams:
                grams.add(place, self.text)
            self.text.append(token)

    def end(self) -> None:
        """End a text: no n-gram continues with the next one."""
        for grams in self._grams:
            grams.skip()
        self.text.append(END)

    def _extend_by_many(self, tokens: npt.NDArray[np.int64]) -> None:
        place = len(self.text)
        reach = self._grams[-1].size
        before = np.array(self.text[max(0, place - reach) :], dtype=np.int64)
        for grams in self._grams:
            grams.add_all(place, np.concatenate((before[-grams.size :], tokens[:-1])), count=len(tokens))
        self.text.frombytes(tokens.astype(np.int32).tobytes())

    def suffix(self, token_ids: ListOf[int]) -> Suffix:
        """The suffix of `token_ids`, to be looked up in any index of the same lengths."""
        tokens = array("i", token_ids[-self._lengths.most :])
        return Suffix(tokens, tuple(_key(tokens[-grams.size :]) for grams in self._grams))

    def longest(self, suffix: Suffix) -> Found:
        """The longest suffix of at least `least` tokens that occurs, and where. Matches longer than `most` count as `most`."""
        for grams, key in zip(reversed(self._grams), reversed(suffix.keys), strict=True):
            if grams.size <= len(suffix.tokens):
                found = self._visit(grams, key, suffix.tokens)
                if found.places:
                    return found
        return NOTHING

    def _visit(self, grams: _Grams, key: int, suffix: Tokens) -> Found:
        text, size = self.text, len(suffix)
        length = grams.size
        end, places = suffix[-length:], list[int]()
        place = grams.newest(key)
        for _ in range(MOST_VISITED):
            if not place:
                break
            if text[place - length : place] == end:
                longer = length
                while longer < size and longer < place and text[place - longer - 1] == suffix[-longer - 1]:
                    longer += 1
                if longer > length:
                    length, end, places = longer, suffix[-longer:], []
                places.append(place)
                if length == size and len(places) == MOST_FOUND:
                    break
            place = grams.before[place]
        return Found(length, places[:MOST_FOUND])


class _Grams:
    """The chains of the n-grams of one length. Place 0 means none."""

    def __init__(self, size: int, *, capacity: int) -> None:
        self.size = size
        self.before: Tokens = array("i")
        bits = max(4, (capacity - 1).bit_length())
        self._shift = 64 - bits
        self._newest: Tokens = array("i", bytes(4 << bits))

    def newest(self, key: int) -> int:
        return self._newest[key >> self._shift]

    def add(self, place: int, text: Tokens) -> None:
        """Add the n-gram at the end of `text`, whose length is `place`."""
        if place < self.size:
            self.skip()
            return
        slot = _key(text[place - self.size :]) >> self._shift
        self.before.append(self._newest[slot])
        self._newest[slot] = place

    def skip(self) -> None:
        """Leave a place without an n-gram."""
        self.before.append(0)

    def add_all(self, place: int, tokens: npt.NDArray[np.int64], *, count: int) -> None:
        """Add the n-grams that end at `place` and the `count` - 1 places behind it; `tokens` are all of theirs."""
        before = np.zeros(count, dtype=np.int32)
        num_grams = len(tokens) - self.size + 1
        if num_grams > 0:
            first = place + count - num_grams
            slots = (_hashes(tokens, self.size) >> np.uint64(self._shift)).astype(np.int64)
            before[-num_grams:] = self._link(slots, first)
        self.before.frombytes(before.tobytes())

    def _link(self, slots: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.int32]:
        """Put the places from `first` on at the front of their slots' chains; returns the place before each."""
        ordered = np.sort((slots << 32) | np.arange(len(slots)))  # by slot, then by place
        order, slot = ordered & 0xFFFFFFFF, ordered >> 32
        places = (first + order).astype(np.int32)
        newest = np.frombuffer(self._newest, dtype=np.int32)
        begins = np.concatenate(([True], slot[1:] != slot[:-1]))
        before = np.empty(len(slots), dtype=np.int32)
        before[order] = np.where(begins, newest[slot], np.roll(places, 1))
        ends = np.roll(begins, -1)
        newest[slot[ends]] = places[ends]
        return before


def _key(gram: Tokens) -> int:
    key = 0
    for token in gram:
        key = (key + token + 1) * _MULTIPLIER & _MASK
    return key


def _hashes(tokens: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint64]:
    """`_key` of each run of `size` tokens."""
    numbers = tokens.astype(np.uint64)
    count = len(numbers) - size + 1
    keys = np.zeros(count, dtype=np.uint64)
    for index in range(size):
        keys = (keys + numbers[index : index + count] + np.uint64(1)) * np.uint64(_MULTIPLIER)
    return keys
