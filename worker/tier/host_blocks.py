"""The policy of the host tier: which blocks it has, in which slots, and which it gives up. No tensors, no threads.

A host block is all that the groups keep beside one block of tokens. It is found whole or not at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.cache.changes import Listener
from engine.groups import Entry

SEEN_OF_SLOTS = 4  # digests remembered of blocks that left the pool, for each slot


@dataclass(slots=True, eq=False)
class HostBlock:
    """The slots of each group's entry, by the group's number, with the digests of their bytes."""

    digest: bytes
    slots: dict[int, Entry] = field(default_factory=dict)
    sums: dict[int, bytes] = field(default_factory=dict)
    uses: int = 0  # copies in flight, for whose time its slots are nobody else's
    was_found: bool = False  # a prompt began with it
    is_gone: bool = False


class Below(Protocol):
    """A lower tier's view of host blocks."""

    def used(self, digest: bytes) -> None:
        """A block came, or was used again."""

    def left(self, block: HostBlock) -> None:
        """A block gave way to others."""

    def wrong(self, digest: bytes) -> None:
        """A block's content proved wrong, whether it was here or not."""


class SecondSight:
    """Digests of blocks that left a tier: one that comes again is worth keeping in the next."""

    def __init__(self, num_slots: int) -> None:
        self._most = SEEN_OF_SLOTS * num_slots
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def left(self, digest: bytes) -> None:
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def admits(self, digest: bytes) -> bool:
        return digest in self._seen


class HostBlocks:
    """Host blocks by digest, the one used longest ago first to go.

    With `second_sight` a block is let in when it leaves the pool for the second time, or was found there: a tier that is not
    much larger than the pool would else be filled by what nobody asks for again.
    """

    def __init__(self, num_slots: int, *, second_sight: bool = False) -> None:
        self.num_slots = num_slots
        self.evicted = 0  # host blocks given up for others
        self.below: Below | None = None
        self._second_sight = SecondSight(num_slots) if second_sight else None
        self._free = list(range(num_slots - 1, -1, -1))
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first
        self._changed: dict[bytes, None] = {}
        self.listener: Listener | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    def get(self, digest: bytes) -> HostBlock | None:
        return self._blocks.get(digest)

    def has(self, number: int, digest: bytes) -> bool:
        """True if the block's entry of this group is here."""
        block = self._blocks.get(digest)
        return block is not None and number in block.slots

    def touch(self, digest: bytes, *, was_found: bool = False) -> None:
        """Record a use."""
        block = self._blocks.get(digest)
        if block is not None:
            block.was_found |= was_found
            self._blocks.move_to_end(digest)
            if self.below is not None:
                self.below.used(digest)

    def left(self, digest: bytes) -> None:
        """Record that a block left the pool."""
        if self._second_sight is not None:
            self._second_sight.left(digest)

    def admits(self, digest: bytes, *, was_found: bool) -> bool:
        """True if the block may be stored."""
        seen = self._second_sight
        return seen is None or was_found or seen.admits(digest) or digest in self._blocks

    def reserve(self, sizes: Mapping[int, int]) -> dict[int, Entry] | None:
        """Slots for entries of so many blocks, by group, for which others may have to go; None if too many are in use."""
        wanted = sum(sizes.values())
        if wanted > self.num_slots:
            return None
        while len(self._free) < wanted:
            oldest = next((block for block in self._blocks.values() if not block.uses), None)
            if oldest is None:
                return None
            self._remove(oldest)
            self.evicted += 1
            if self.below is not None:
                self.below.left(oldest)
        return {number: tuple(self._free.pop() for _ in range(size)) for number, size in sizes.items()}

    def add(
        self, digest: bytes, slots: Mapping[int, Entry], sums: Mapping[int, bytes], *, was_found: bool = False
    ) -> None:
        """Keep a block, or more groups' entries of one, under its digest. The slots are those reserved, now written.

        An entry that is here already stays, and the slots are free again.
        """
        if self.listener is not None and digest not in self._blocks:
            self.listener.came(digest)
        block = self._blocks.setdefault(digest, HostBlock(digest))
        for number, entry in slots.items():
            if number in block.slots:
                self.give_back({number: entry})
            else:
                block.slots[number], block.sums[number] = entry, sums[number]
        self._changed[digest] = None
        self.touch(digest, was_found=was_found)

    def give_back(self, slots: Mapping[int, Entry]) -> None:
        """Free reserved slots, which hold nothing."""
        for entry in slots.values():
            self._free.extend(entry)

    def forget(self, digest: bytes) -> None:
        """Give a block up whose content proved wrong; unknown ones are ignored."""
        block = self._blocks.get(digest)
        if block is not None:
            self._remove(block)
        if self.below is not None:
            self.below.wrong(digest)

    def begin_use(self, block: HostBlock) -> None:
        block.uses += 1

    def end_use(self, block: HostBlock) -> None:
        block.uses -= 1
        if block.is_gone and not block.uses:
            self.give_back(block.slots)

    def drain_changed(self) -> list[bytes]:
        """Digests that came or left since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def _remove(self, block: HostBlock) -> None:
        del self._blocks[block.digest]
        self._changed[block.digest] = None
        block.is_gone = True
        if self.listener is not None:
            self.listener.went(block.digest)
        if not block.uses:
            self.give_back(block.slots)
