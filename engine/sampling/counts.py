"""Token counts of each sequence on the device, for repetition, presence and frequency penalties.

A count row belongs to one living sequence. It is built once from the host's tokens and then follows the sequence token by
token, including tokens that the host does not know yet. A restarted sequence (preempted, resumed) is built anew, and so are
the rows behind drafted tokens, which count these, too.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from engine.arrays import Longs
from engine.kernels.sampling import GENERATED, count_tokens
from engine.sequence import Chunk, Sequence
from engine.step.staging import NewestTokens

_PROMPT = -0x8000  # the sign bit of an int16


class CountSize(msgspec.Struct, frozen=True, array_like=True):
    """A pass's changes of the counts without its sequences: the arrays are among the pass's words."""

    rows: int  # count rows in all
    cleared: tuple[int, ...]  # count rows that start from zero
    entries: tuple[int, int]  # first word and the one behind the last
    places: tuple[int, int]


@dataclass(slots=True)
class CountChanges:
    """A pass's changes of the counts. The arrays travel with the pass's other words."""

    rows: list[int] = field(default_factory=list)  # each chunk's count row
    cleared: list[int] = field(default_factory=list)  # count rows that start from zero
    entries: list[Longs] = field(default_factory=list)  # index in flat `counts` << 16 | value
    # Pairs: start of a row in flat `counts`, and the token to count. A token that is only on the device is -1 - its row of
    # NewestTokens.
    places: list[int] = field(default_factory=list)


_Key = tuple[int, int]  # id of the sequence, drafted tokens that count


def _key(chunk: Chunk) -> _Key:
    return id(chunk.sequence), len(chunk.drafted)


@dataclass(slots=True)
class _CountRow:
    index: int
    end: int  # tokens counted
    turn: int  # the last pass that used it
    finalizer: weakref.finalize[[_Key], Sequence]


class TokenCounts:
    """Count rows for at most `max_rows` sequences; more of them share rows, which are rebuilt."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int16, device=device)
        self._num_rows = 0  # planned; `apply` allocates them
        self._free: list[int] = []
        self._dead: deque[_Key] = deque()  # rows of dropped sequences; any thread may append
        self._rows: dict[_Key, _CountRow] = {}
        self._turn = 0

    def plan(self, chunks: SequenceOf[Chunk], newest: NewestTokens) -> CountChanges:
        """Plan changes after which these chunks' rows count exactly the tokens before each chunk's end. Plans apply in order."""
        while self._dead:  # first: a new sequence may reuse the id of a dead one
            self._free.append(self._rows.pop(self._dead.popleft()).index)
        changes = CountChanges()
        self._turn += 1
        rows: list[_CountRow] = []
        for chunk in chunks:
            row = self._rows.get(_key(chunk)) or self._new_row(chunk)
            row.turn = self._turn
            rows.append(row)
            if row.end != chunk.start or chunk.num_tokens != 1 or chunk.drafted:
                self._build(chunk, row.index, newest, changes)
            else:
                self._follow(chunk, row.index, newest, changes)
        for chunk, row in zip(chunks, rows, strict=True):  # only after all chunks were checked
            row.end = chunk.end
        changes.rows = [row.index for row in rows]
        return changes

    def size(self, changes: CountChanges, entries: slice, places: slice) -> CountSize:
        """Say what `apply` needs of planned changes, whose arrays have these places among a pass's words."""
        cleared = tuple(changes.cleared)
        return CountSize(self._num_rows, cleared, (entries.start, entries.stop), (places.start, places.stop))

    def apply(self, size: CountSize, words: torch.Tensor, newest: torch.Tensor) -> None:
        """Change the counts: `words` are the pass's on the device, `newest` the samples of the pass before."""
        if size.rows > len(self.counts):
            before = self.counts
            self.counts = before.new_empty((size.rows, self._vocab_size))
            self.counts[: len(before)] = before
        for row in size.cleared:
            self.counts[row].zero_()
        entries, places = words[slice(*size.entries)], words[slice(*size.places)].view(-1, 2)
        if len(entries):
            self.counts.view(-1).index_copy_(0, entries >> 16, ((entries << 48) >> 48).to(torch.int16))
        if len(places):
            count_tokens(self.counts, places, newest)

    def _new_row(self, chunk: Chunk) -> _CountRow:
        if not self._free and self._num_rows < self._max_rows:
            self._grow()
        if not self._free:
            key = min(self._rows, key=lambda key: self._rows[key].turn)
            if self._rows[key].turn == self._turn:
                raise ValueError(f"more than {self._max_rows} sequences with penalties in one pass")
            oldest = self._rows.pop(key)
            oldest.finalizer.detach()
            self._free.append(oldest.index)
        key = _key(chunk)
        finalizer = weakref.finalize(chunk.sequence, self._dead.append, key)
        finalizer.atexit = False
        row = self._rows[key] = _CountRow(self._free.pop(), -1, self._turn, finalizer)
        return row

    def _grow(self) -> None:
        before, self._num_rows = self._num_rows, min(self._max_rows, max(8, 2 * self._num_rows))
        self._free.extend(range(before, self._num_rows))

    def _follow(self, chunk: Chunk, index: int, newest: NewestTokens, changes: CountChanges) -> None:
        known, last = chunk.sequence.token_ids, chunk.end - 1
        if last < len(known):
            token = known[last]
            if not 0 <= token < self._vocab_size:
                return
        else:
            row = newest.row_of(chunk.sequence)
            if row is None:
                raise ValueError(f"request {chunk.sequence.request_id}: nobody samples token {last}")
            token = -1 - row
        changes.places += (index * self._vocab_size, token)

    def _build(self, chunk: Chunk, index: int, newest: NewestTokens, changes: CountChanges) -> None:
        sequence = chunk.sequence
        known = np.array([*sequence.token_ids[: chunk.end], *chunk.drafted], dtype=np.int64)
        inside = (known >= 0) & (known < self._vocab_size)
        generated = known[sequence.num_prompt_tokens :][inside[sequence.num_prompt_tokens :]]
        prompt = np.unique(known[: sequence.num_prompt_tokens][inside[: sequence.num_prompt_tokens]])
        tokens, counts = np.unique(generated, return_counts=True)
        values = np.minimum(counts, GENERATED)
        both = np.isin(tokens, prompt, assume_unique=True)
        ids = np.concatenate((prompt[~np.isin(prompt, tokens, assume_unique=True)], tokens))
        values = np.concatenate((np.full(len(ids) - len(tokens), _PROMPT), values + np.where(both, _PROMPT, 0)))
        changes.cleared.append(index)
        changes.entries.append((index * self._vocab_size + ids) << 16 | (values & 0xFFFF))
        if chunk.end > len(known):
            self._follow(chunk, index, newest, changes)
