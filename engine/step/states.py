"""The recurrent states of a pass: blocks that decoding sequences read and write, and the tiles of prompts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from engine.arrays import Integers, Ints, Longs
from engine.batch.layout import Packed, StatesSize
from engine.groups import Entry
from engine.kernels.delta import deal_out_states
from engine.kernels.delta.plan import CARRIED, NOTHING
from engine.sequence import Chunk
from engine.step.limits import InPlaceGroup, Limits, check_entry

_PLACES = [2, 3, 5]  # columns of tiles that refer to states
MOST_CHANGED = 16  # entries that are cheaper to change one by one
_CARRIED: Entry = (CARRIED,)  # read by a drafted token
_NO_BLOCKS: dict[Entry, int] = {(): NOTHING, _CARRIED: CARRIED}


class DecodingStates:
    """The state blocks of decoding sequences, cached for the next pass: nearly all stay in the same blocks."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []  # what each sequence reads, then what it writes
        self._ids: dict[Entry, Longs] = {}  # their blocks as arrays
        self._moves: Ints = np.zeros((0, 0, 2), dtype=np.int32)

    def moves(self, decoding: SequenceOf[Chunk], limits: Limits) -> Ints:
        """For each of a state's blocks, what each row reads and writes [blocks, S, 2]. Raises InvalidChunkError.

        A drafted token's row reads what the row before it left.
        """
        group, size, entries = limits.tables.in_place, limits.block_size, list[Entry]()
        assert group is not None
        for chunk in decoding:
            table, start = chunk.sequence.tables[group.number], chunk.start
            own = table.entries
            entries += (own[(start - 1) // size] if start else (), own[start // size])
            for entry in table.behind[: len(chunk.drafted)]:
                entries += (_CARRIED, entry)
        changed = [
            at for at, (entry, before) in enumerate(zip(entries, self._entries, strict=False)) if entry != before
        ]
        if len(entries) != len(self._entries) or len(changed) > MOST_CHANGED or not entries:
            self._moves = self._found(entries, group, limits.num_blocks)
        else:
            self._moves = self._changed(entries, changed, group, limits.num_blocks)
        self._entries = entries
        return self._moves

    def _changed(self, entries: list[Entry], places: list[int], group: InPlaceGroup, num_blocks: int) -> Ints:
        """The moves with these entries in their places: sequences go on in fresh ones at the ends of blocks, a few a pass."""
        moves = self._moves.copy()
        self._entries = []  # until all were checked
        for at in places:
            entry = entries[at]
            place = _NO_BLOCKS.get(entry)
            moves[:, at // 2, at % 2] = check_entry(entry, group, num_blocks) if place is None else place
        return moves

    def _found(self, entries: list[Entry], group: InPlaceGroup, num_blocks: int) -> Ints:
        self._entries = []  # until all were checked
        known: dict[Entry, Longs] = {
            entry: np.full(group.blocks, place, dtype=np.int64) for entry, place in _NO_BLOCKS.items()
        }
        for entry in entries:
            if entry not in known:
                ids = self._ids.get(entry)
                known[entry] = np.array(check_entry(entry, group, num_blocks), dtype=np.int64) if ids is None else ids
        self._ids = known
        if not entries:
            return np.zeros((group.blocks, 0, 2), dtype=np.int32)
        ids = np.concatenate([known[entry] for entry in entries]).reshape(-1, 2, group.blocks)
        return np.ascontiguousarray(ids.transpose(2, 0, 1), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class States:
    """State updates of one pass. Prompt tiles refer to states by index at first."""

    moves: Ints  # [blocks of a state, S, 2]
    tiles: Integers  # [I, 8]
    runs: Integers
    blocks: Longs  # [N, blocks of a state], of the prompts

    @classmethod
    def of(cls, moves: Ints, prompts: SequenceOf[Chunk], first_row: int, limits: Limits) -> States:
        """The prompts' rows begin with `first_row`. Raises InvalidChunkError."""
        group, numbers, size = limits.tables.in_place, _Numbers(), limits.block_size
        assert group is not None
        tables = np.full((len(prompts), max((-(-chunk.end // size) for chunk in prompts), default=0)), -1, np.int32)
        for table, chunk in zip(tables, prompts, strict=True):
            first, end = max(0, chunk.start - 1) // size, -(-chunk.end // size)
            table[first:end] = numbers.of(chunk.sequence.tables[group.number].entries[first:end])
        lengths = np.array([chunk.num_tokens for chunk in prompts], dtype=np.int64)
        starts = np.array([chunk.start for chunk in prompts], dtype=np.int64)
        rows = first_row + np.cumsum(lengths) - lengths
        tiles, runs = deal_out_states(starts, starts + lengths, rows, tables, block_size=size)
        entries = [check_entry(entry, group, limits.num_blocks) for entry in numbers.entries]
        blocks = np.array(entries, dtype=np.int64).reshape(-1, group.blocks)
        return cls(moves, tiles, runs, blocks)

    def size(self) -> StatesSize:
        blocks, moves, _ = self.moves.shape
        return StatesSize(moves=moves, tiles=len(self.tiles), runs=len(self.runs), blocks=blocks)

    def put(self, packed: Packed) -> None:
        packed.put_copies("state_moves", self.moves)
        if not len(self.tiles):
            return
        packed.put("state_runs", self.runs)
        tiles = np.repeat(self.tiles[None], self.blocks.shape[1], axis=0)
        numbers = self.tiles[:, _PLACES]  # negative entries have other meanings
        tiles[:, :, _PLACES] = np.where(numbers >= 0, self.blocks.T[:, np.maximum(numbers, 0)], numbers)
        packed.put_copies("state_tiles", tiles)


class _Numbers:
    """Assigns indices to the states of a pass's prompts."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def of(self, entries: SequenceOf[Entry]) -> list[int]:
        """The number of each entry. Those of one prompt that are equal are one."""
        numbers, before = list[int](), Entry()
        for entry in entries:
            if entry != before:
                self.entries.append(entry)
                before = entry
            numbers.append(len(self.entries) - 1)
        return numbers
