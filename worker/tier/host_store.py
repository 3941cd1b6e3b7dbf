"""Slots of the host tier, and who may write to them: one process's own memory, or a region that processes of a host share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.groups import Entry
from worker.tier.shares import Owner


@dataclass(slots=True, eq=False)
class Write:
    """Entries of a block of tokens on their way into slots, by their group's number.

    Shared slots are there `HostStore.filling`; who fills them sets `sums`, the digests of the bytes.
    """

    digest: bytes
    sizes: Mapping[int, int]  # slots of each group's entry
    owner: Owner | None = None
    slots: dict[int, Entry] = field(default_factory=dict)
    sums: dict[int, bytes] = field(default_factory=dict)
    is_void: bool = False  # the bytes may be others'
    generations: dict[int, int] = field(default_factory=dict)  # where all processes find it

    @property
    def is_published(self) -> bool:
        """True if a shared store has it already."""
        return bool(self.generations)

    @property
    def num_slots(self) -> int:
        return sum(self.sizes.values())


class Known(Protocol):
    """Host blocks that a process knows, which a shared store keeps up to date."""

    def came(self, digest: bytes, number: int, slots: Entry, sums: bytes, *, is_own: bool, owner: Owner | None) -> None:
        """An entry was written; `is_own`: by this process."""

    def went(self, digest: bytes, slots: Entry) -> None:
        """An entry's slots are others' now."""


class HostStore(Protocol):
    """Slots by number. A process's event loop calls all but those that say otherwise, and waits for no lock."""

    num_slots: int
    is_shared: bool
    evicted: int  # host blocks that the store itself gave up for this process
    surplus: int  # those of tenants beyond their shares

    @property
    def num_used(self) -> int:
        """Slots that are not free."""

    @property
    def owes(self) -> bool:
        """True if `settle` has something to do."""

    def reserve(self, write: Write) -> bool:
        """Find slots, if that is not left to `filling`; False if too few are free."""

    def give_back(self, slots: Entry) -> None:
        """Free slots whose content nobody wants."""

    def take_back(self, write: Write) -> None:
        """Free the slots of a write, which nobody may read."""

    def touch(self, slots: Entry) -> None:
        """Record a use."""

    def charge(self, slots: Entry, owner: Owner | None) -> None:
        """Record who is charged with slots now."""

    def pin(self, slots: Entry, count: int) -> None:
        """Keep slots from eviction by others; a negative count undoes it."""

    def tell(self, known: Known) -> None:
        """Tell what changed since the last call."""

    def is_kept(self, slots: Entry) -> bool:
        """False if others have these slots by now, told or not."""

    def filling(self, writes: Sequence[Write]) -> AbstractContextManager[None]:
        """The time in which slots are filled. A write whose slots are missing then is not filled. On a thread that copies."""

    def settle(self) -> None:
        """Do what waits for a lock. On a thread that copies."""

    def chunk(self, first: int, shape: tuple[int, int], *, is_pinned: bool) -> torch.Tensor:
        """The bytes of slots from number `first` on. Raises MemoryError. On a thread that copies."""

    def close(self) -> None:
        """Leave the memory; nobody copies any more."""


class PrivateStore:
    """Memory of this process alone."""

    evicted, surplus, owes, is_shared = 0, 0, False, False

    def __init__(self, num_slots: int, chunk: Callable[..., torch.Tensor] | None = None) -> None:
        """`chunk`: provides the memory, see `HostStore.chunk`; None: this process's own."""
        self.num_slots, self._given = num_slots, chunk
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def reserve(self, write: Write) -> bool:
        if len(self._free) < write.num_slots:
            return False
        write.slots = {number: tuple(self._free.pop() for _ in range(size)) for number, size in write.sizes.items()}
        return True

    def give_back(self, slots: Entry) -> None:
        self._free.extend(slots)

    def take_back(self, write: Write) -> None:
        for slots in write.slots.values():
            self.give_back(slots)

    def touch(self, slots: Entry) -> None:
        """No-op: `HostBlocks` keeps the order."""

    def charge(self, slots: Entry, owner: Owner | None) -> None:
        """No-op: `HostBlocks` knows the owners."""

    def pin(self, slots: Entry, count: int) -> None:
        """No-op: `HostBlocks` counts uses."""

    def tell(self, known: Known) -> None:
        """No-op: nobody else writes."""

    def is_kept(self, slots: Entry) -> bool:
        return True

    def filling(self, writes: Sequence[Write]) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        """No-op: nothing waits."""

    def chunk(self, first: int, shape: tuple[int, int], *, is_pinned: bool) -> torch.Tensor:
        if self._given is not None:
            return self._given(first, shape, is_pinned=is_pinned)
        try:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:  # torch's, for lack of memory, too
            raise MemoryError(f"no room for {shape[0] * shape[1] >> 20} MiB: lower --kv-host-mb") from error

    def close(self) -> None:
        """No-op: it goes with the process."""
