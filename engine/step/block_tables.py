"""Block tables on the host, cached between passes: rebuilding them takes longer than a small model's step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from engine.arrays import Ints, Longs
from engine.passes import InvalidChunkError
from engine.sequence import Chunk, Sequence, first_column
from engine.step.states import DecodingStates


@dataclass(slots=True)
class _Row:
    """One sequence's blocks and columns; `sources` are the lists that were copied."""

    index: int
    sources: tuple[list[int], list[tuple[int, ...]]]
    num_blocks: int = 0
    num_columns: int = 0
    num_gone: int = 0  # leading columns that are -1

    def goes_on(self, blocks: list[int], columns: list[tuple[int, ...]], first: int) -> bool:
        """True if the copy is still a prefix of the lists, and only columns before `first` were dropped."""
        is_same = self.sources[0] is blocks and self.sources[1] is columns
        is_longer = len(blocks) >= self.num_blocks and len(columns) >= self.num_columns
        return is_same and is_longer and first >= self.num_gone


@dataclass(slots=True)
class BlockTables:
    """[1 + columns, rows, max_blocks] int32: a row for each sequence of recent passes. A pass adds its new blocks.

    The first table has blocks of tokens, each of the others one block of every column, or -1 where no window sees it.
    """

    max_blocks: int
    num_blocks: int  # the pool's size; ids must be below
    columns: int = 0  # blocks of a column
    window: int = 0  # positions
    block_size: int = 16
    num_rows: int = 8  # initial capacity
    table: Ints = field(init=False)
    decoding_states: DecodingStates = field(init=False, default_factory=DecodingStates)
    _rows: weakref.WeakKeyDictionary[Sequence, _Row] = field(init=False, default_factory=weakref.WeakKeyDictionary)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # Zero pages are allocated when touched, so capacity for long tables costs nothing.
        self.table = np.zeros((1 + self.columns, self.num_rows, self.max_blocks), dtype=np.int32)
        self._free = list(range(self.num_rows - 1, -1, -1))

    def rows_of(self, chunks: SequenceOf[Chunk]) -> list[int]:
        """Return each chunk's row. Raises InvalidChunkError for a block that is not in the pool."""
        return [
            self._sync(chunk.sequence, first_column(chunk.start, self.window, self.block_size) if self.columns else 0)
            for chunk in chunks
        ]

    def _sync(self, sequence: Sequence, first: int) -> int:
        blocks, columns, row = sequence.block_table, sequence.columns, self._rows.get(sequence)
        if row is None:
            row = _Row(self._take(), (blocks, columns))
            self._rows[sequence] = row
            weakref.finalize(sequence, self._free.append, row.index).atexit = False
        elif not row.goes_on(blocks, columns, first):
            row.sources, row.num_blocks, row.num_columns, row.num_gone = (blocks, columns), 0, 0, 0
        if (count := len(blocks)) > row.num_blocks:
            self.table[0, row.index, row.num_blocks : count] = self._checked(blocks[row.num_blocks : count], sequence)
            row.num_blocks = count
        if self.columns and (count := len(columns)) > row.num_columns:
            self.table[1:, row.index, row.num_columns : count] = self._transposed(
                columns[row.num_columns : count], sequence
            )
            row.num_columns = count
        if first > row.num_gone:
            self.table[1:, row.index, row.num_gone : first] = -1
            row.num_gone = first
        return row.index

    def _checked(self, blocks: SequenceOf[int], sequence: Sequence) -> Longs:
        found = np.array(blocks, dtype=np.int64)
        if wrong := found[(found < 0) | (found >= self.num_blocks)].tolist():
            raise InvalidChunkError(f"request {sequence.request_id}: block {wrong[0]} is not in [0, {self.num_blocks})")
        return found

    def _transposed(self, columns: SequenceOf[tuple[int, ...]], sequence: Sequence) -> Longs:
        """[blocks of a column, columns]."""
        there = [column for column in columns if column]
        if wrong := [column for column in there if len(column) != self.columns]:
            raise InvalidChunkError(
                f"request {sequence.request_id}: a column of {len(wrong[0])} blocks, not {self.columns}"
            )
        found = np.full((len(columns), self.columns), -1, dtype=np.int64)
        if there:
            ids = self._checked([block for column in there for block in column], sequence)
            found[[bool(column) for column in columns]] = ids.reshape(-1, self.columns)
        return found.T

    def _take(self) -> int:
        if not self._free:
            tables, count, width = self.table.shape
            more = np.zeros((tables, max(8, count), width), dtype=np.int32)
            self.table = np.concatenate((self.table, more), axis=1)
            self._free.extend(range(self.table.shape[1] - 1, count - 1, -1))
        return self._free.pop()
