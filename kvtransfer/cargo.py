"""The blocks of a handoff, in the order in which both ends number and push them.

A sequence has entries in one or several groups of layers, each of some blocks, beside its blocks of tokens (`common.pages`).
They go in the order in which they become final: by blocks of tokens, and of one block by group. Entries that no token from
the prompt's end on reads stay where they are, and so does what the receiver has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CargoGroup:
    """One group's share of a cargo: entries from `first` on, of so many blocks each."""

    blocks: int = 1
    first: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """One block that is pushed: its group, its entry there and its number in the entry."""

    group: int
    entry: int
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """A prompt of `num_tokens` tokens. The first group is that of its blocks."""

    num_tokens: int
    block_size: int
    groups: Sequence[CargoGroup] = (CargoGroup(),)
    num_blocks: int = field(init=False)  # those of its tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_blocks", -(-self.num_tokens // self.block_size))

    def lacking(self, firsts: Sequence[int]) -> list[Item]:
        """The blocks that go to a receiver with all entries before these, by group."""
        begins = [max(first, group.first) for group, first in zip(self.groups, firsts, strict=True)]
        return [
            Item(number, entry, block)
            for entry in range(min(begins), self.num_blocks)
            for number, group in enumerate(self.groups)
            if entry >= begins[number]
            for block in range(group.blocks)
        ]

    def final_at(self, item: Item) -> int:
        """The number of computed tokens from which on a block is final."""
        return min((item.entry + 1) * self.block_size, self.num_tokens)

    def place(self, items: Sequence[Item], blocks: Sequence[int]) -> list[list[tuple[int, ...]]]:
        """The entries that the blocks pushed for these items make, by group."""
        placed: list[dict[int, list[int]]] = [{} for _ in self.groups]
        for item, block in zip(items, blocks, strict=True):
            placed[item.group].setdefault(item.entry, []).append(block)
        return [[tuple(entry) for entry in entries.values()] for entries in placed]


def pick(items: Sequence[Item], tables: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    """The blocks of these items, in a sequence's entries by group."""
    return [tables[item.group][item.entry][item.number] for item in items]
