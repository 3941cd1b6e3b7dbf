"""KV groups: layers that keep the same positions, and the table that a sequence has of each group.

An entry is what a group keeps beside one block of tokens, in `blocks` blocks of the pool. One class says what a kind of group
keeps; `GROUPS` is the list of kinds. No pool, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from common.pages import KVGroup, KVLayout
from common.words import Keeps

Entry = tuple[int, ...]  # blocks; () went, or never was here

# Entries besides a window's: the one that a pass in flight still sees, and the one that is begun.
MARGIN = 2
# In tokens: a prompt with fewer entries ahead would take too many passes.
LEAST_AHEAD = 512
# Tokens between checkpoints along a sequence, and at least between any two. The unit: tokens that an entry's blocks would hold.
CHECKPOINT_EVERY = 2.0
LEAST_CHECKPOINT = 0.25


@dataclass(slots=True, eq=False)
class Table:
    """A sequence's entries of one group: entry i belongs to its i-th block of tokens.

    Entries before `num_gone` are (). Equal neighbours are one entry, which changes in place from block to block.
    """

    entries: list[Entry] = field(default_factory=list)
    num_shared: int = 0  # leading entries that were published, found or never here
    num_gone: int = 0
    begin: int = 0  # tokens before the last entry was this sequence's own
    behind: list[Entry] = field(default_factory=list)  # states behind the drafted tokens of a pass in flight
    ends: list[int] = field(default_factory=list)  # checkpoints of a generation's last full blocks, in tokens

    def left(self, at: int, num_drafted: int) -> Entry:
        """The entry that a token in block `at` leaves its state in: the last of so many drafted ones, or one without (0)."""
        return self.behind[num_drafted - 1] if num_drafted else self.entries[at]

    def go_on_in(self, fresh: Entry, at: int, block_size: int) -> None:
        """Go on in a fresh entry behind the first `at` tokens. The one before stays as it is there: a checkpoint."""
        first, self.begin = at // block_size, at
        self.entries[first:] = [fresh] * max(1, len(self.entries) - first)

    def accept(self, start: int, num_drafted: int, block_size: int, *, shortest: float) -> list[Entry]:
        """Go on from the state behind so many drafted tokens, of a pass whose first token is at `start`.

        Return the entries that nobody needs any more. Nothing is copied: the state's entry takes the place of the one before.
        The state at the end of a block on the way stays as a checkpoint, unless that is for fewer tokens than the `shortest`.
        """
        unneeded, self.behind = self.behind, []
        if num_drafted:
            at, last = start // block_size, (start + num_drafted) // block_size
            before, accepted = self.entries[at], unneeded[num_drafted - 1]
            first, end = at, at + 1
            while first and self.entries[first - 1] == before:
                first -= 1
            while end < len(self.entries) and self.entries[end] == before:
                end += 1
            self.entries[first:end] = [accepted] * (end - first)
            states, kept = [before, *unneeded], {num_drafted}  # behind the token at `start`, and each drafted one
            if last > at and last * block_size >= shortest:
                kept.add(passed := last * block_size - start - 1)
                self.entries[first:last] = [states[passed]] * (last - first)
                self.begin = last * block_size
                self.ends.append(self.begin)
            unneeded = [state for number, state in enumerate(states) if number not in kept]
        return unneeded

    def own(self) -> Iterator[tuple[int, Entry]]:
        """The entries that are there, each once, with the last index at which it stands."""
        last = len(self.entries) - 1
        for at in range(self.num_gone, len(self.entries)):
            entry = self.entries[at]
            if entry and (at == last or self.entries[at + 1] != entry):
                yield at, entry
        for entry in self.behind:
            yield last, entry


class Group(Protocol):
    """The kind of a group: the entries that it keeps. Positions and lengths are in tokens, `num_entries` in blocks of tokens."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def blocks(self) -> int:
        """Blocks of an entry."""

    @property
    def grows(self) -> bool:
        """True if each block of tokens needs an entry of its own. Else one entry goes on in place, and a copy is a checkpoint."""

    @property
    def most(self) -> int:
        """Entries that a sequence needs at most at a time; 0: all."""

    @property
    def resume_distance(self) -> int:
        """Tokens between the places from which a sequence that gave way may go on; 0: any full block."""

    def first_seen(self, position: int) -> int:
        """The first entry that a token at this position reads, and with it all tokens behind."""

    def passed(self, table: Table, num_computed: int) -> int:
        """The entries before this one may go: no pass in flight, and no token behind, reads them."""

    def asked(self, lacking: int, ahead: int | None, slack: int) -> tuple[int, int]:
        """The least and the most fresh entries that a sequence takes at admission, which lacks so many.

        `ahead`: tokens that passes may compute before entries go; None: all. `slack`: entries beyond `most` that fit into the
        pool beside all else that the sequence holds.
        """

    def shares_all(self, table: Table, num_entries: int) -> bool:
        """True if all entries of full blocks are shared, besides those that go."""

    def checkpoints(self, table: Table, begin: int, end: int, branches: SequenceOf[int]) -> list[int]:
        """The places in a chunk [begin, end) behind which a sequence goes on in a fresh entry. `branches`: where it should."""

    def entries_behind(self, table: Table, position: int, most: int, branches: SequenceOf[int]) -> int | None:
        """Entries that a pass needs for what `most` drafted tokens leave, behind the token at `position`; None: none.

        A draft is as long as these are many.
        """

    def resumes_afresh(self, table: Table, at: int) -> bool:
        """True if the sequence that gives way next should go on in a fresh entry behind `at` tokens, to resume from there."""

    def resumes_later(self, *, gone: int, computed: int) -> bool:
        """True if a later place should be held for a sequence, of which so much went and was computed since one was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """A group that keeps all tokens."""

    block_size: int
    blocks: int = 1
    grows: bool = True
    most: int = 0
    resume_distance: int = 0

    @classmethod
    def of(cls, group: KVGroup, block_size: int) -> Full:
        return cls(block_size=block_size, blocks=group.blocks_per_entry)

    def first_seen(self, position: int) -> int:
        return 0

    def passed(self, table: Table, num_computed: int) -> int:
        return 0

    def asked(self, lacking: int, ahead: int | None, slack: int) -> tuple[int, int]:
        return lacking, lacking

    def shares_all(self, table: Table, num_entries: int) -> bool:
        return True

    def checkpoints(self, table: Table, begin: int, end: int, branches: SequenceOf[int]) -> list[int]:
        return []

    def entries_behind(self, table: Table, position: int, most: int, branches: SequenceOf[int]) -> int | None:
        return None

    def resumes_afresh(self, table: Table, at: int) -> bool:
        return False

    def resumes_later(self, *, gone: int, computed: int) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A group that keeps the tokens within a sliding window, the own one included.

    A prompt is admitted with entries of a window and of the chunks in flight. Entries that finished passes leave behind make
    room for the next chunk's: as many are taken as went, at the same moment. So a prompt that was admitted waits for nobody.
    It must hold its entries alone for that: until it has all of them, it publishes one only as it goes. What it found doesn't
    count.
    """

    block_size: int
    window: int
    blocks: int = 1
    grows: bool = True

    @classmethod
    def of(cls, group: KVGroup, block_size: int) -> Window:
        return cls(block_size=block_size, window=group.window, blocks=group.blocks_per_entry)

    @property
    def seen(self) -> int:
        """Entries that the first token of a block reads, besides its own."""
        return -(-(self.window - 1) // self.block_size)

    @property
    def most(self) -> int:
        return self.seen + MARGIN

    @property
    def resume_distance(self) -> int:
        """Half a window: the first blocks that others take are those behind the place."""
        return max(1, self.seen // 2) * self.block_size

    def first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.block_size

    def passed(self, table: Table, num_computed: int) -> int:
        """Passes in flight begin at `num_computed` or behind. A sequence that gave way is found again at its last full block."""
        full = num_computed // self.block_size * self.block_size
        return max(table.num_gone, min(self.first_seen(full), len(table.entries)))

    def asked(self, lacking: int, ahead: int | None, slack: int) -> tuple[int, int]:
        if ahead is None:
            return lacking, lacking
        fitting = max(0, min(lacking, min(lacking, self.most) + slack))
        most = self.most - (-ahead // self.block_size)
        least = self.most - (-min(ahead, LEAST_AHEAD) // self.block_size)
        return min(fitting, least), min(fitting, most)

    def shares_all(self, table: Table, num_entries: int) -> bool:
        return len(table.entries) >= num_entries

    def checkpoints(self, table: Table, begin: int, end: int, branches: SequenceOf[int]) -> list[int]:
        return []

    def entries_behind(self, table: Table, position: int, most: int, branches: SequenceOf[int]) -> int | None:
        return None

    def resumes_afresh(self, table: Table, at: int) -> bool:
        return False

    def resumes_later(self, *, gone: int, computed: int) -> bool:
        return computed > self.resume_distance


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A group that keeps one recurrent state a sequence, which tokens change in place.

    Entry i is where the state behind the last computed token of block i is. By going on in a fresh entry a sequence leaves a
    checkpoint, and nothing is copied.
    """

    block_size: int
    blocks: int = 1
    grows: bool = False
    most: int = 1

    @classmethod
    def of(cls, group: KVGroup, block_size: int) -> State:
        return cls(block_size=block_size, blocks=group.blocks_per_entry)

    @property
    def resume_distance(self) -> int:
        """Tokens from one regular checkpoint of a sequence to the next."""
        return int(CHECKPOINT_EVERY * self.blocks * self.block_size)

    def first_seen(self, position: int) -> int:
        return max(0, position - 1) // self.block_size

    def passed(self, table: Table, num_computed: int) -> int:
        """A checkpoint may go once a pass that went on from it is over: then it is final, and no other pass reads it."""
        entries, at = table.entries, min(self.first_seen(num_computed), len(table.entries) - 1)
        if at <= table.num_gone or entries[at] == entries[table.num_gone]:
            return table.num_gone
        entry = entries[at]
        while entries[at - 1] == entry:
            at -= 1
        return at

    def asked(self, lacking: int, ahead: int | None, slack: int) -> tuple[int, int]:
        return 1, 1

    def shares_all(self, table: Table, num_entries: int) -> bool:
        return False

    def checkpoints(self, table: Table, begin: int, end: int, branches: SequenceOf[int]) -> list[int]:
        every, least = self.resume_distance, LEAST_CHECKPOINT * self.blocks * self.block_size
        places = [at for at in branches if begin <= at < end]
        for at in range(-(-begin // every) * every, end, every):
            if not any(0 <= other - at < least for other in branches):
                places.append(at)
        chosen, before = list[int](), table.begin
        for at in sorted(places):
            if at - before >= least:
                chosen.append(at)
                before = at
        return chosen

    def entries_behind(self, table: Table, position: int, most: int, branches: SequenceOf[int]) -> int | None:
        """One for each; but passes begin at checkpoints, so no draft goes across the next."""
        own, size, first = table.entries[position // self.block_size], self.block_size, position + 1
        places = self.checkpoints(table, first, first + most, branches)
        blocks = range(position // size + 1, (position + most) // size + 1)
        places += [at * size for at in blocks if table.entries[at] != own]
        return min(places, default=first + most) - first

    def resumes_afresh(self, table: Table, at: int) -> bool:
        """Unless a checkpoint is on its way."""
        return table.begin < at and table.entries[max(table.num_shared, table.num_gone)] == table.entries[-1]

    def resumes_later(self, *, gone: int, computed: int) -> bool:
        return gone > 0


GROUPS: dict[Keeps, Callable[[KVGroup, int], Group]] = {
    Keeps.ALL: Full.of,
    Keeps.WINDOW: Window.of,
    Keeps.STATE: State.of,
}


def groups_of(layout: KVLayout) -> tuple[Group, ...]:
    """The groups of a layout, the one of blocks of tokens first."""
    return (Full(block_size=layout.block_size), *(group_of(group, layout.block_size) for group in layout.groups))


def group_of(group: KVGroup, block_size: int) -> Group:
    return GROUPS[group.keeps](group, block_size)


def lacking_entries(group: Group, table: Table, num_entries: int) -> int:
    """Fresh entries that a table needs to cover so many blocks of tokens."""
    return max(0, num_entries - len(table.entries)) if group.grows else 0


def extend(group: Group, table: Table, fresh: SequenceOf[Entry], num_entries: int) -> None:
    """Add fresh entries, and cover so many blocks of tokens as far as that goes."""
    table.entries.extend(fresh)
    if not group.grows:
        table.entries.extend(table.entries[-1:] * (num_entries - len(table.entries)))


def entries_of(blocks: SequenceOf[int], per_entry: int) -> list[Entry]:
    """So many blocks an entry."""
    return [tuple(blocks[at : at + per_entry]) for at in range(0, len(blocks), per_entry)]


def resumable(groups: SequenceOf[Group], block_size: int, most: int, has: Callable[[int, int], bool]) -> int:
    """The longest prefix of at most `most` blocks that one can go on from: in each group all is there that the next token reads.

    `has(number, at)`: whether entry `at` of this group is there.
    """
    count, before = most, -1
    while count != before:
        before = count
        for number, group in enumerate(groups):
            at = count - 1
            # Without entry `at` a sequence can go on only from in front of it: `first_seen` grows with the position.
            while at >= group.first_seen(count * block_size):
                if not has(number, at):
                    count = at
                at -= 1
    return count


def longest_entries(groups: SequenceOf[Group], num_blocks: int) -> int:
    """Blocks of tokens of the longest sequence that fits into so many blocks alone."""
    low, high = 0, num_blocks
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held_at_most(groups, middle) <= num_blocks else (low, middle - 1)
    return low


def held_at_most(groups: SequenceOf[Group], num_entries: int) -> int:
    """Blocks that a sequence of so many blocks of tokens needs at most at a time."""
    return sum(group.blocks * min(num_entries, group.most or num_entries) for group in groups)
