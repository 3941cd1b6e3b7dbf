"""Block tables on the host, cached between passes: rebuilding them takes longer than a small model's step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from engine.arrays import Ints, Longs
from engine.groups import Entry, Group
from engine.passes import InvalidChunkError
from engine.sequence import Chunk, Sequence
from engine.step.limits import GroupTables
from engine.step.states import DecodingStates


@dataclass(slots=True)
class _Copied:
    """The part of a sequence's table that was copied."""

    source: list[Entry] | None = None  # the list that it was copied from
    num_entries: int = 0
    num_gone: int = 0  # leading entries that are -1


@dataclass(slots=True)
class _Row:
    """One sequence's row, and what was copied of each group with block tables."""

    index: int
    copied: list[_Copied]


@dataclass(slots=True)
class BlockTables:
    """[1 + more tables, rows, max_blocks] int32: a row for each sequence that was in a pass. A pass adds its new entries.

    The first table has blocks of tokens, each of the others one block of every entry of a further group, or -1 where no token
    reads it.
    """

    max_blocks: int
    num_blocks: int  # the pool's; ids must be below
    groups: GroupTables
    num_rows: int = 8  # to begin with
    table: Ints = field(init=False)
    decoding_states: DecodingStates = field(init=False, default_factory=DecodingStates)
    _rows: weakref.WeakKeyDictionary[Sequence, _Row] = field(init=False, default_factory=weakref.WeakKeyDictionary)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # Zeroed memory comes as it is touched, so room for long tables costs nothing.
        self.table = np.zeros((self.groups.count, self.num_rows, self.max_blocks), dtype=np.int32)
        self._free = list(range(self.num_rows - 1, -1, -1))

    def rows_of(self, chunks: SequenceOf[Chunk]) -> list[int]:
        """Return each chunk's row. Raises InvalidChunkError for a block that is not in the pool."""
        return [self._sync(chunk.sequence, chunk.start) for chunk in chunks]

    def place_of(self, sequence: Sequence) -> tuple[int, int]:
        """Return the row of a sequence that was in a pass, and the number of its blocks of tokens."""
        row = self._rows[sequence]
        return row.index, row.copied[0].num_entries

    def _sync(self, sequence: Sequence, start: int) -> int:
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = _Row(self._take(), [_Copied() for _ in self.groups.paged])
            weakref.finalize(sequence, self._free.append, row.index).atexit = False
        for paged, copied in zip(self.groups.paged, row.copied, strict=True):
            entries, first = sequence.tables[paged.number].entries, paged.group.first_seen(start)
            count = len(entries)
            if copied.source is not entries or count < copied.num_entries or first < copied.num_gone:
                copied.source, copied.num_entries, copied.num_gone = entries, 0, 0
            if count > copied.num_entries:
                new = self._blocks(entries[copied.num_entries : count], paged.group, sequence)
                self.table[paged.tables, row.index, copied.num_entries : count] = new
                copied.num_entries = count
            if first > copied.num_gone:
                self.table[paged.tables, row.index, copied.num_gone : first] = -1
                copied.num_gone = first
        return row.index

    def _blocks(self, entries: SequenceOf[Entry], group: Group, sequence: Sequence) -> Longs:
        """[blocks of an entry, entries]."""
        there = [entry for entry in entries if entry]
        if wrong := [entry for entry in there if len(entry) != group.blocks]:
            raise InvalidChunkError(
                f"request {sequence.request_id}: an entry of {len(wrong[0])} blocks, not {group.blocks}"
            )
        ids = np.array(there, dtype=np.int64).reshape(-1, group.blocks)
        if out := ids[(ids < 0) | (ids >= self.num_blocks)].tolist():
            raise InvalidChunkError(f"request {sequence.request_id}: block {out[0]} is not in [0, {self.num_blocks})")
        if len(there) == len(entries):
            return ids.T
        found = np.full((len(entries), group.blocks), -1, dtype=np.int64)
        found[[bool(entry) for entry in entries]] = ids
        return found.T

    def _take(self) -> int:
        if not self._free:
            tables, count, width = self.table.shape
            more = np.zeros((tables, max(8, count), width), dtype=np.int32)
            self.table = np.concatenate((self.table, more), axis=1)
            self._free.extend(range(self.table.shape[1] - 1, count - 1, -1))
        return self._free.pop()
