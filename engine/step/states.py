"""The recurrent states of a pass: blocks that decoding sequences read and write, and the tiles of prompts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from engine.arrays import Integers, Ints, Longs
from engine.batch.layout import Packed, StatesSize
from engine.kernels.delta import deal_out_states
from engine.kernels.delta.plan import NOTHING
from engine.sequence import Chunk, State
from engine.step.limits import Limits, check_states, is_in_pool

_PLACES = [2, 3, 5]  # columns of tiles that refer to states


class DecodingStates:
    """The state blocks of decoding sequences, cached for the next pass: nearly all stay in the same blocks."""

    def __init__(self) -> None:
        self._states: list[tuple[State, ...]] = []  # one for each sequence; empty if some changed blocks
        self._begins = np.zeros(0, dtype=np.int64)
        self._moves: Ints = np.zeros((0, 0, 2), dtype=np.int32)

    def moves(self, decoding: SequenceOf[Chunk], starts: Longs, limits: Limits) -> Ints:
        """For each of a state's blocks, the blocks that sequences read and write [blocks, S, 2]. Raises InvalidChunkError."""
        states = [chunk.states for chunk in decoding]
        if not states or states != self._states or not (starts > self._begins).all():
            self._moves, all_stay = self._found(decoding, limits)
            self._states = states if all_stay else []
            self._begins = np.array([own[0].begin for own in self._states], dtype=np.int64)
        return self._moves

    def _found(self, decoding: SequenceOf[Chunk], limits: Limits) -> tuple[Ints, bool]:
        """The moves, and True for each sequence that updates its only state in place."""
        written = list[Longs]()
        others = list[tuple[int, State | None]]()  # rows that read another state than they write
        of_state, in_pool = limits.state_blocks, limits.num_blocks
        for row, chunk in enumerate(decoding):
            state = chunk.states[0] if len(chunk.states) == 1 else None
            if state is None or not state.holds(chunk.start) or not is_in_pool(state, of_state, in_pool):
                check_states(chunk, limits)
                state = chunk.state_behind(chunk.start)
                others.append((row, chunk.state_behind(chunk.start - 1) if chunk.start else None))
                assert state is not None, "checked"
            written.append(state.ids)
        moves = np.empty((of_state, len(decoding), 2), dtype=np.int32)
        if decoding:
            moves[:] = np.concatenate(written).reshape(len(decoding), -1).T[:, :, None]
        for row, before in others:
            moves[:, row, 0] = NOTHING if before is None else before.ids
        return moves, not others


@dataclass(frozen=True, slots=True)
class States:
    """State updates of one pass. Prompt tiles refer to states by index at first."""

    moves: Ints  # [state_blocks, S, 2]
    tiles: Integers  # [I, 8]
    runs: Integers
    blocks: Longs  # [N, state_blocks], of the prompts' states

    @classmethod
    def of(cls, moves: Ints, prompts: SequenceOf[Chunk], first_row: int, limits: Limits) -> States:
        """The updates; prompts' rows start at `first_row`. Raises InvalidChunkError."""
        for chunk in prompts:
            check_states(chunk, limits)
        numbers = _Numbers()
        size = limits.block_size
        tables = np.full((len(prompts), max((-(-chunk.end // size) for chunk in prompts), default=0)), -1, np.int32)
        for table, chunk in zip(tables, prompts, strict=True):
            for column in range(max(0, chunk.start - 1) // size, -(-chunk.end // size)):
                # Checkpoints follow full blocks, so the last of a block's tokens in this chunk decides for all.
                table[column] = numbers.behind(chunk, min((column + 1) * size, chunk.end) - 1)
        lengths = np.array([chunk.num_tokens for chunk in prompts], dtype=np.int64)
        starts = np.array([chunk.start for chunk in prompts], dtype=np.int64)
        rows = first_row + np.cumsum(lengths) - lengths
        tiles, runs = deal_out_states(starts, starts + lengths, rows, tables, block_size=size)
        blocks = np.array([state.ids for state in numbers.states], dtype=np.int64).reshape(-1, limits.state_blocks)
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
        self.states: list[State] = []
        self._known: dict[tuple[int, State], int] = {}  # by sequence

    def behind(self, chunk: Chunk, position: int) -> int:
        """The state after the token at this position; -1 before the first token."""
        if position < 0:
            return -1
        state = chunk.state_behind(position)
        assert state is not None, "checked"
        number = self._known.setdefault((id(chunk), state), len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number
