"""Tables of sequences, written and read without a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.pages import KVLayout
from common.words import Keeps
from engine.cache.block_pool import BlockPool
from engine.groups import Entry, Full, Group, State, Table, Window, entries_of
from engine.sequence import Sequence as Tokens


def groups_with(
    block_size: int, *, state_blocks: int = 0, window: int = 0, window_blocks: int = 0
) -> tuple[Group, ...]:
    """Blocks of tokens, and what else there is: entries of so many blocks each."""
    groups: list[Group] = [Full(block_size=block_size)]
    if window:
        groups.append(Window(block_size=block_size, window=window, blocks=window_blocks))
    if state_blocks:
        groups.append(State(block_size=block_size, blocks=state_blocks))
    return tuple(groups)


def entry_blocks(layout: KVLayout, keeps: Keeps) -> int:
    """Blocks of an entry of this kind of group; 0: there is none."""
    return sum(group.blocks_per_entry for group in layout.groups if group.keeps is keeps)


def table_of(blocks: Iterable[int]) -> Table:
    """A table of blocks of tokens."""
    return Table(entries_of(list(blocks), 1))


def entries_table(entries: Iterable[Entry], *, num_shared: int = 0) -> Table:
    """A table of a further group, whose first entries may be ()."""
    own = list(entries)
    return Table(own, num_shared=num_shared, num_gone=next((at for at, entry in enumerate(own) if entry), len(own)))


def blocks_of_tokens(sequence: Tokens) -> list[int]:
    """The blocks of the first group."""
    return [block for entry in sequence.tables[0].entries for block in entry] if sequence.tables else []


def held_entries(table: Table) -> list[Entry]:
    """The entries that are there, each once."""
    return [entry for _, entry in table.own()]


def resumed(pool: BlockPool, digests: Sequence[bytes]) -> tuple[list[int], list[Entry]]:
    """The cached part of a sequence, in a pool with one further group: blocks of tokens, and the other group's entries."""
    tokens, entries = pool.match_resumable(digests)
    return [block for (block,) in tokens], entries
