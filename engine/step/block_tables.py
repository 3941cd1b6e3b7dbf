"""Block tables on the host, kept between passes: rebuilding them takes longer than a small model's step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from engine.arrays import Ints
from engine.passes import InvalidChunkError
from engine.sequence import Chunk, Sequence
from engine.step.states import DecodingStates


@dataclass(slots=True)
class _Row:
    """One sequence's block table; `source` is the list it was copied from."""

    index: int
    source: list[int]
    num_blocks: int = 0


@dataclass(slots=True)
class BlockTables:
    """[rows, max_blocks] int32: a row for each sequence that was in a pass. A pass adds its new blocks."""

    max_blocks: int
    num_blocks: int  # the pool's; ids must be below
    num_rows: int = 8  # to begin with
    table: Ints = field(init=False)
    decoding_states: DecodingStates = field(init=False, default_factory=DecodingStates)
    _rows: weakref.WeakKeyDictionary[Sequence, _Row] = field(init=False, default_factory=weakref.WeakKeyDictionary)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # Zeroed memory comes as it is touched, so room for long tables costs nothing.
        self.table = np.zeros((self.num_rows, self.max_blocks), dtype=np.int32)
        self._free = list(range(self.num_rows - 1, -1, -1))

    def rows_of(self, chunks: SequenceOf[Chunk]) -> list[int]:
        """Return each chunk's row. Raises InvalidChunkError for a block that is not in the pool."""
        return [self._sync(chunk.sequence) for chunk in chunks]

    def _sync(self, sequence: Sequence) -> int:
        blocks, row = sequence.block_table, self._rows.get(sequence)
        if row is None:
            row = _Row(self._take(), blocks)
            self._rows[sequence] = row
            weakref.finalize(sequence, self._free.append, row.index).atexit = False
        elif row.source is not blocks or len(blocks) < row.num_blocks:
            row.source, row.num_blocks = blocks, 0
        if (count := len(blocks)) > row.num_blocks:
            added = np.array(blocks[row.num_blocks : count], dtype=np.int64)
            if wrong := added[(added < 0) | (added >= self.num_blocks)].tolist():
                raise InvalidChunkError(
                    f"request {sequence.request_id}: block {wrong[0]} is not in [0, {self.num_blocks})"
                )
            self.table[row.index, row.num_blocks : count] = added
            row.num_blocks = count
        return row.index

    def _take(self) -> int:
        if not self._free:
            count = len(self.table)
            self.table = np.concatenate((self.table, np.zeros((max(8, count), self.max_blocks), dtype=np.int32)))
            self._free.extend(range(len(self.table) - 1, count - 1, -1))
        return self._free.pop()
