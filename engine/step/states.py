"""Where the sequences of a pass keep their states: what decoding ones read and write, and how prompts are cut."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from engine.arrays import Integers, Ints, Longs
from engine.kernels.delta import deal_out_states
from engine.sequence import Chunk, State
from engine.step.layout import Packed, StatesSize
from engine.step.limits import Limits

_PLACES = [2, 3, 5]  # the columns of tiles that name states


@dataclass(frozen=True, slots=True)
class States:
    """The places are numbers of states first; each of a state's blocks has a copy with its own ids instead."""

    moves: Longs  # [S, 2]
    tiles: Integers  # [I, 8]
    runs: Integers
    blocks: Ints  # [N, state_blocks]

    @classmethod
    def of(cls, decoding: SequenceOf[Chunk], prompts: SequenceOf[Chunk], first_row: int, limits: Limits) -> States:
        """The prompts' rows begin with `first_row`."""
        numbers = _Numbers()
        moves = [(numbers.behind(chunk, chunk.start - 1), numbers.behind(chunk, chunk.start)) for chunk in decoding]
        size = limits.block_size
        tables = np.full((len(prompts), max((-(-chunk.end // size) for chunk in prompts), default=0)), -1, np.int32)
        for table, chunk in zip(tables, prompts, strict=True):
            for column in range(max(0, chunk.start - 1) // size, -(-chunk.end // size)):
                # Checkpoints are behind full blocks: the last of a block's tokens here speaks for all.
                table[column] = numbers.behind(chunk, min((column + 1) * size, chunk.end) - 1)
        lengths = np.array([chunk.num_tokens for chunk in prompts], dtype=np.int64)
        starts = np.array([chunk.start for chunk in prompts], dtype=np.int64)
        rows = first_row + np.cumsum(lengths) - lengths
        tiles, runs = deal_out_states(starts, starts + lengths, rows, tables, block_size=size)
        blocks = np.array(numbers.blocks, dtype=np.int32).reshape(-1, limits.state_blocks)
        return cls(np.array(moves, dtype=np.int64).reshape(-1, 2), tiles, runs, blocks)

    def size(self) -> StatesSize:
        return StatesSize(
            moves=len(self.moves), tiles=len(self.tiles), runs=len(self.runs), blocks=self.blocks.shape[1]
        )

    def put(self, packed: Packed) -> None:
        packed.put("state_runs", self.runs)
        if len(self.moves):
            packed.put_copies("state_moves", self._ids(self.moves))
        if len(self.tiles):
            tiles = np.repeat(self.tiles[None], self.blocks.shape[1], axis=0)
            tiles[:, :, _PLACES] = self._ids(self.tiles[:, _PLACES])
            packed.put_copies("state_tiles", tiles)

    def _ids(self, numbers: Integers) -> Integers:
        """For each of a state's blocks the ids instead of the numbers; what is negative says something else."""
        return np.where(numbers >= 0, self.blocks.T[:, np.maximum(numbers, 0)], numbers)


class _Numbers:
    """Numbers the states of a pass."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, ...]] = []
        self._known: dict[tuple[int, State], int] = {}  # by sequence

    def behind(self, chunk: Chunk, position: int) -> int:
        """The state behind the token at this position; -1 before the first token."""
        if position < 0:
            return -1
        state = chunk.state_behind(position)
        assert state is not None, "checked"
        number = self._known.setdefault((id(chunk), state), len(self.blocks))
        if number == len(self.blocks):
            self.blocks.append(state.blocks)
        return number
