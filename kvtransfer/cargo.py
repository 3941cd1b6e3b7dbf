"""The blocks of a handoff, in the order in which both ends number and push them.

A prompt's blocks have indices: those of its tokens, then those of all columns, one column after the other, then the state's.
They go in the order in which they become final: each block of tokens, its column behind it, and the state last. Columns that
nobody sees from the prompt's end on stay where they are, and so does what the receiver has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """A prompt of `num_tokens` tokens in a layout; `first_column`: the oldest column that the next token needs."""

    num_tokens: int
    block_size: int
    state_blocks: int = 0
    column_blocks: int = 0
    first_column: int = 0
    num_blocks: int = field(init=False)  # token blocks

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_blocks", -(-self.num_tokens // self.block_size))

    @property
    def _first_of_state(self) -> int:
        """The index after the last column's."""
        return self.num_blocks * (1 + self.column_blocks)

    def lacking(self, first_block: int, first_column: int) -> list[int]:
        """The blocks to push to a receiver that has those before `first_block` and the columns before `first_column`."""
        columns = self.column_blocks
        oldest = max(first_column, self.first_column) if columns else self.num_blocks
        indices = []
        for entry in range(min(first_block, oldest), self.num_blocks):
            if entry >= first_block:
                indices.append(entry)
            if entry >= oldest:
                first = self.num_blocks + entry * columns
                indices += range(first, first + columns)
        first = self._first_of_state
        return [*indices, *range(first, first + self.state_blocks)]

    def final_at(self, index: int) -> int:
        """The number of computed tokens after which a block is final."""
        if index < self.num_blocks:
            entry = index
        elif index < self._first_of_state:
            entry = (index - self.num_blocks) // self.column_blocks
        else:
            entry = self.num_blocks
        return min((entry + 1) * self.block_size, self.num_tokens)

    def pick(
        self, indices: Sequence[int], tokens: Sequence[int], columns: Sequence[tuple[int, ...]], state: Sequence[int]
    ) -> list[int]:
        """Select the blocks with these indices from a sequence's."""
        picked = []
        for index in indices:
            if index < self.num_blocks:
                picked.append(tokens[index])
            elif index < self._first_of_state:
                entry, number = divmod(index - self.num_blocks, self.column_blocks)
                picked.append(columns[entry][number])
            else:
                picked.append(state[index - self._first_of_state])
        return picked

    def place(
        self, indices: Sequence[int], blocks: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, ...]], list[int]]:
        """Sort the pushed blocks of these indices into token blocks, columns and state blocks."""
        tokens, columns, state = list[int](), list[int](), list[int]()
        for index, block in zip(indices, blocks, strict=True):
            is_of_column = self.num_blocks <= index < self._first_of_state
            (tokens if index < self.num_blocks else columns if is_of_column else state).append(block)
        rest = iter(columns)
        return tokens, list(iter(lambda: tuple(islice(rest, self.column_blocks)), ())), state
