"""The policy of the host tier: which blocks it has, in which slots, and which it gives up. No tensors, no threads.

A host block is all that the groups keep beside one block of tokens. It is found whole or not at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from engine.cache.changes import Listener
from engine.groups import Entry
from worker.tier.host_store import HostStore, Write
from worker.tier.shares import Owner, Shares

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
    is_taken: bool = False  # the slots are others' now
    is_own: bool = True  # this process wrote it, and writes it to its files
    owner: Owner | None = None

    @property
    def all_slots(self) -> Entry:
        return (*chain(*self.slots.values()),)


class Below(Protocol):
    """A lower tier's view of host blocks."""

    def used(self, digest: bytes) -> None:
        """A block came, or was used again."""

    def common(self, digest: bytes) -> None:
        """A block is no single tenant's any more."""

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
    """Host blocks by digest, the one used longest ago first to go; before it what tenants have beyond their shares.

    With `second_sight` a block makes others give way when it leaves the pool for the second time, or was found there: else what
    nobody asks for again would push out what somebody does. Into free slots anything is let.
    """

    def __init__(self, store: HostStore, *, second_sight: bool = False) -> None:
        self.num_slots = store.num_slots
        self._store, self._evicted, self._surplus = store, 0, 0
        self.below: Below | None = None
        self._second_sight = SecondSight(store.num_slots) if second_sight else None
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first
        self._shares = Shares(store.num_slots)
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
        return self._store.num_used

    @property
    def evicted(self) -> int:
        """Host blocks given up for others."""
        return self._evicted + self._store.evicted

    @property
    def evicted_surplus(self) -> int:
        """Part of these that were beyond their tenant's share."""
        return self._surplus + self._store.surplus

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
            self._shares.touch(block.owner, digest)
            self._store.touch(block.all_slots)  # at one time: it leaves whole
            if self.below is not None and block.is_own:
                self.below.used(digest)

    def released(self, digest: bytes, owner: Owner | None, *, was_found: bool) -> None:
        """Record a use in the pool, and who is charged there: a block of several tenants is common here, too."""
        self.touch(digest, was_found=was_found)
        block = self._blocks.get(digest)
        if block is None or block.owner is None or block.owner == owner:
            return
        self._shares.remove(block.owner, digest)
        is_same = owner is not None and owner.key == block.owner.key
        block.owner = owner if is_same else None  # its share may be another
        self._shares.add(block.owner, digest, len(block.all_slots))
        self._store.charge(block.all_slots, block.owner)
        if self.below is not None and not is_same:
            self.below.common(digest)

    def left(self, digest: bytes) -> None:
        """Record that a block left the pool."""
        if self._second_sight is not None:
            self._second_sight.left(digest)

    def admits(self, digest: bytes, *, was_found: bool, num_slots: int = 1) -> bool:
        """True if a block may have slots; `num_slots`: those that it takes, and those on their way to others."""
        seen = self._second_sight
        if seen is None or was_found or seen.admits(digest) or digest in self._blocks:
            return True
        return num_slots <= self.num_slots - self.num_used

    def reserve(self, digest: bytes, sizes: Mapping[int, int], owner: Owner | None = None) -> Write | None:
        """A write of entries of so many blocks, by group, for which others may have to go; None if too many are in use."""
        known = self._blocks.get(digest)
        write = Write(digest, sizes, owner if known is None else known.owner)
        if write.num_slots > self.num_slots:
            return None
        self._shares.charge(write.owner, write.num_slots)
        while not self._store.reserve(write):
            going = self._next_to_go(write.owner)
            if going is None:
                self._shares.charge(write.owner, -write.num_slots)
                return None
            self._remove(going)
            self._evicted += 1
            if self.below is not None:
                self.below.left(going)
        return write

    def _next_to_go(self, owner: Owner | None) -> HostBlock | None:
        """The block that gives way to one of this owner."""
        beyond = map(self._blocks.__getitem__, self._shares.surplus())
        if (surplus := next((block for block in beyond if not block.uses), None)) is not None:
            self._surplus += 1
            return surplus
        if self._shares.is_over(owner):
            return None
        return next((block for block in self._blocks.values() if not block.uses), None)

    def add(self, write: Write, *, was_found: bool = False) -> None:
        """Keep a block, or more groups' entries of one, that was written.

        An entry that is here already stays, and the slots are free again.
        """
        self.catch_up()
        self._shares.charge(write.owner, -write.num_slots)
        if not write.is_published:
            for number, entry in write.slots.items():
                if not self._has_kept(write.digest, number, entry, write.sums[number], owner=write.owner):
                    self._store.give_back(entry)
        self.touch(write.digest, was_found=was_found)

    def _has_kept(
        self, digest: bytes, number: int, entry: Entry, sums: bytes, *, owner: Owner | None, is_own: bool = True
    ) -> bool:
        """Keep an entry, unless the group has one."""
        if self.listener is not None and digest not in self._blocks:
            self.listener.came(digest)
        block = self._blocks.setdefault(digest, HostBlock(digest, is_own=is_own, owner=owner))
        if number in block.slots:
            return False
        block.slots[number], block.sums[number] = entry, sums
        self._shares.add(block.owner, digest, len(entry))
        if block.uses:
            self._store.pin(entry, block.uses)
        self._changed[digest] = None
        return True

    def drop(self, write: Write) -> None:
        """Let go of a write that nobody may read."""
        self._shares.charge(write.owner, -write.num_slots)
        self._store.take_back(write)

    def forget(self, digest: bytes) -> None:
        """Give a block up whose content proved wrong; unknown ones are ignored."""
        block = self._blocks.get(digest)
        if block is not None:
            self._remove(block)
        if self.below is not None:
            self.below.wrong(digest)

    def unread(self, digest: bytes) -> None:
        """Forget a block that this process could not read; others that share the memory keep it."""
        block = self._blocks.get(digest)
        if block is not None:
            block.is_taken = self._store.is_shared
            self._remove(block)

    def begin_use(self, block: HostBlock) -> None:
        block.uses += 1
        for entry in block.slots.values():
            self._store.pin(entry, 1)

    def end_use(self, block: HostBlock) -> None:
        block.uses -= 1
        for entry in block.slots.values():
            self._store.pin(entry, -1)
        if block.is_gone and not block.uses:
            self._give_back(block)

    # -- what other processes did --------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Hear what processes that share the memory wrote and gave up."""
        self._store.tell(self)

    def came(self, digest: bytes, number: int, slots: Entry, sums: bytes, *, is_own: bool, owner: Owner | None) -> None:
        self._has_kept(digest, number, slots, sums, is_own=is_own, owner=owner)

    def went(self, digest: bytes, slots: Entry) -> None:
        block = self._blocks.get(digest)
        if block is not None and slots in block.slots.values():
            block.is_taken = True
            self._remove(block)
            if self.below is not None and block.is_own:
                self.below.left(block)

    def drain_changed(self) -> list[bytes]:
        """Digests that came or left since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def _remove(self, block: HostBlock) -> None:
        del self._blocks[block.digest]
        self._shares.remove(block.owner, block.digest)
        self._changed[block.digest] = None
        block.is_gone = True
        if self.listener is not None:
            self.listener.went(block.digest)
        if not block.uses:
            self._give_back(block)

    def _give_back(self, block: HostBlock) -> None:
        for entry in () if block.is_taken else block.slots.values():
            self._store.give_back(entry)
