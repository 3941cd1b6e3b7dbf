"""The host tier that workers of a host share: slots are claimed and published under the region's lock, by threads that copy.

The event loop takes no lock. It reads what changed from a ring of slot numbers, and writes times of use and pins, which are
hints: what was evicted nonetheless, or reused while it was copied, does not fit its digest and is a miss.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from engine.groups import Entry
from worker.tier.host_store import Known, Write
from worker.tier.region import EMPTY, READY, WRITING, Label, Region
from worker.tier.shares import NOBODY, Owner, surplus_of_slots

log = logging.getLogger("baton.tier")

TOLD_AT_ONCE = 1_024  # changes: an event loop has other work
# One part of so many, since finding the oldest reads all times of use.
EVICTED_PARTS = 64
SUM_BYTES = 8
UNPUBLISHED = 0  # no label's generation


@dataclass(slots=True)
class _Entry:
    """A group's entry, as far as its labels were read."""

    label: Label
    parts: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # slots and digests

    @property
    def slots(self) -> Entry:
        return tuple(self.parts[at][0] for at in sorted(self.parts))


class SharedStore:
    """A process's view of a region; see `HostStore`."""

    is_shared = True

    def __init__(self, region: Region) -> None:
        self.region, self.num_slots = region, region.num_slots
        self.evicted = self.surplus = 0
        self._told = int(region.counts[0])  # changes
        self._unread = iter(range(region.num_slots))  # slots
        self._entries: dict[int, _Entry] = {}  # by generation
        self._generations: dict[int, int] = {}  # by slot
        self._owed: deque[tuple[int, int]] = deque()  # slots to free, unless their generation is another
        self._registered: list[torch.Tensor] = []

    # -- on the event loop ---------------------------------------------------------------------------------------------

    @property
    def num_used(self) -> int:
        return int(np.count_nonzero(self.region.state))

    @property
    def owes(self) -> bool:
        return bool(self._owed)

    def reserve(self, write: Write) -> bool:
        return True

    def give_back(self, slots: Entry) -> None:
        self._owed.extend((slot, self._generations[slot]) for slot in slots if slot in self._generations)

    def take_back(self, write: Write) -> None:
        self._owed.extend((slot, write.generations[number]) for number, slots in write.slots.items() for slot in slots)

    def touch(self, slots: Entry) -> None:
        now = time.monotonic_ns()
        for slot in slots:
            self.region.used[slot] = now

    def charge(self, slots: Entry, owner: Owner | None) -> None:
        for slot in slots:
            self.region.owner[slot], self.region.share[slot] = owner or (NOBODY, 1.0)

    def pin(self, slots: Entry, count: int) -> None:
        for slot in slots:
            self.region.pins[self.region.member, slot] += count

    def tell(self, known: Known) -> None:
        for slot in self._changed():
            label = self.region.label(slot)
            generation = None if label is None else label.generation
            before = self._generations.get(slot)
            if generation == before:
                continue
            if before is not None:
                self._forget(before, known)
            if label is not None:
                self._learn(slot, label, known)

    def is_kept(self, slots: Entry) -> bool:
        labels = [self.region.label(slot) for slot in slots]
        return all(
            label is not None and label.generation == self._generations.get(slot)
            for slot, label in zip(slots, labels, strict=True)
        )

    def _changed(self) -> Iterator[int]:
        """Slots whose label may be another, a bounded number of them."""
        for _, slot in zip(range(TOLD_AT_ONCE), self._unread, strict=False):
            yield slot
        count = int(self.region.counts[0])
        # The oldest of more changes than the ring has stay unknown until those slots change again: that costs hits alone.
        first = max(self._told, count - self.num_slots)
        self._told = min(count, first + TOLD_AT_ONCE)
        for at in range(first, self._told):
            yield int(self.region.ring[at % self.num_slots])

    def _learn(self, slot: int, label: Label, known: Known) -> None:
        self._generations[slot] = label.generation
        entry = self._entries.setdefault(label.generation, _Entry(label))
        entry.parts[label.at] = slot, label.sum
        if len(entry.parts) == label.size:
            sums = b"".join(entry.parts[at][1] for at in range(label.size))
            owner = Owner(int(self.region.owner[slot]), float(self.region.share[slot]))
            known.came(
                label.digest,
                label.number,
                entry.slots,
                sums,
                is_own=label.writer == self.region.member,
                owner=owner if owner.key else None,
            )

    def _forget(self, generation: int, known: Known) -> None:
        entry = self._entries.pop(generation)
        for slot in entry.slots:
            del self._generations[slot]
        known.went(entry.label.digest, entry.slots)

    # -- on a thread that copies ---------------------------------------------------------------------------------------

    @contextmanager
    def filling(self, writes: Sequence[Write]) -> Iterator[None]:
        self._claim(writes)
        try:
            yield
        except BaseException:
            for write in writes:
                write.is_void = True
            raise
        finally:
            self._publish(writes)

    def _claim(self, writes: Sequence[Write]) -> None:
        try:
            with self.region.locked():
                self._pay()
                free, unmet = self._free(writes)
                for write in sorted(writes, key=lambda write: write.owner is not None and write.owner.key in unmet):
                    if len(free) >= write.num_slots:
                        write.slots = {at: tuple(free.pop() for _ in range(size)) for at, size in write.sizes.items()}
                        taken = (*chain(*write.slots.values()),)
                        for slot in taken:
                            self.region.clear(slot, WRITING)
                        self.touch(taken)
                        self.charge(taken, write.owner)
        except TimeoutError as error:
            log.warning("tier.region_locked", extra={"error": str(error)})

    def _free(self, writes: Sequence[Write]) -> tuple[list[int], dict[int, int]]:
        """Free slots, the first one last, for which others' content goes; and what owners can't have, beyond their shares."""
        wanted, unmet = sum(write.num_slots for write in writes), dict[int, int]()
        free = np.flatnonzero(self.region.state == EMPTY)
        if len(free) < wanted:
            self.region.reclaim_of_dead()
            free = np.flatnonzero(self.region.state == EMPTY)
        if len(free) < wanted:
            unmet = self._evict(wanted - len(free), writes)
            free = np.flatnonzero(self.region.state == EMPTY)
        return [int(slot) for slot in free[:wanted][::-1]], unmet

    def _evict(self, lacking: int, writes: Sequence[Write]) -> dict[int, int]:
        """Free slots: tenants' surplus, then those used longest ago. Return what owners can't have, beyond their shares."""
        region, wanted = self.region, Counter[Owner]()
        for write in writes:
            if write.owner is not None:
                wanted[write.owner] += write.num_slots
        may_go = (region.state == READY) & ~np.any(region.pins[region.living()], axis=0)
        # A key may be that of a slot which is free by now: `charge` takes no lock.
        owner = np.where(region.state == EMPTY, np.uint64(NOBODY), region.owner)
        many = max(lacking, self.num_slots // EVICTED_PARTS)
        beyond, unmet = surplus_of_slots(owner, region.share, region.used, may_go, wanted)
        before = self.evicted
        lacking -= self._let_go(beyond[:many], may_go) + sum(unmet.values())
        self.surplus += self.evicted - before
        if lacking > 0:
            ready = np.flatnonzero(may_go & (region.state == READY))
            oldest = ready[np.argsort(region.used[ready], kind="stable")]
            self._let_go(oldest[: lacking if owner.any() else many], may_go)
        return unmet

    def _let_go(self, slots: NDArray[np.intp], may_go: NDArray[np.bool_]) -> int:
        """Free slots, and with them those used at the same time: a block leaves whole. Return their number."""
        region = self.region
        going = np.flatnonzero(may_go & (region.state == READY) & np.isin(region.used, region.used[slots]))
        for slot in going:
            label = region.label(int(slot))
            self.evicted += label is not None and (label.number, label.at) == (0, 0)
            region.clear(int(slot), EMPTY)
        return len(going)

    def _publish(self, writes: Sequence[Write]) -> None:
        """Make what was filled known, and free the rest."""
        try:
            with self.region.locked():
                for write in writes:
                    if not write.is_void and write.slots and write.slots.keys() == write.sums.keys():
                        self._publish_one(write)
                    else:
                        for slot in [slot for entry in write.slots.values() for slot in entry]:
                            self.region.clear(slot, EMPTY)
        except TimeoutError as error:
            log.warning("tier.region_locked", extra={"error": str(error)})
            for write in writes:
                self._owed.extend((slot, UNPUBLISHED) for entry in write.slots.values() for slot in entry)
        for write in writes:
            if not write.is_published:
                write.slots = {}

    def _publish_one(self, write: Write) -> None:
        now = time.monotonic_ns()
        for number, entry in write.slots.items():
            sums = write.sums[number]
            write.generations[number] = generation = self.region.new_generation()
            for at, slot in enumerate(entry):
                self.region.used[slot] = now
                one = sums[at * SUM_BYTES : (at + 1) * SUM_BYTES]
                label = Label(write.digest, one, number, at, len(entry), self.region.member, generation)
                self.region.set_label(slot, label)

    def settle(self) -> None:
        try:
            with self.region.locked():
                self._pay()
        except TimeoutError as error:
            log.warning("tier.region_locked", extra={"error": str(error)})

    def _pay(self) -> None:
        while self._owed:
            slot, generation = self._owed[0]
            label = self.region.label(slot)
            if generation == (UNPUBLISHED if label is None else label.generation):
                self.region.clear(slot, EMPTY)
            self._owed.popleft()

    def chunk(self, first: int, shape: tuple[int, int], *, is_pinned: bool) -> torch.Tensor:
        memory = chunk_of(self.region.reach, first, shape, is_pinned=is_pinned)
        if is_pinned:
            self._registered.append(memory)
        return memory

    def close(self) -> None:
        for memory in self._registered:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._registered.clear()
        self.region.close()


def chunk_of(
    reach: Callable[[int, int], memoryview], first: int, shape: tuple[int, int], *, is_pinned: bool
) -> torch.Tensor:
    """The bytes of slots that processes share, see `HostStore.chunk` and `Region.reach`."""
    memory = torch.frombuffer(reach(first, shape[0]), dtype=torch.uint8).view(shape)
    if is_pinned:
        failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(failed):
            raise MemoryError(f"{memory.numel() >> 20} MiB can't be pinned: lower --kv-host-mb (error {failed})")
    return memory
