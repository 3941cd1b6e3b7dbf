"""The policy of the file tier: which blocks have a file, and which give it up. No files, no threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from engine.cache.changes import Listener
from worker.tier.kv_files import Stored
from worker.tier.shares import Owner, Shares

NOBODYS: Mapping[Owner | None, int] = MappingProxyType({})
PAGE = 4_096  # bytes that a file system gives out at a time


class FileBlocks:
    """Files by their block's digest, the one used longest ago first to go. They never have more than `max_bytes`.

    Before it goes what tenants have beyond their shares. Files that a former process wrote are nobody's.
    """

    def __init__(self, max_bytes: int, found: Mapping[bytes, Stored]) -> None:
        """`found`: what is there, the oldest first."""
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.evicted = self.evicted_surplus = 0
        self._files: OrderedDict[bytes, Stored] = OrderedDict()  # least recently used first
        self._owners: dict[bytes, Owner] = {}
        self._shares = Shares(max_bytes)
        self._removed: dict[bytes, None] = {}
        self.listener: Listener | None = None
        for digest, stored in found.items():
            self.add(digest, stored)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._files

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._files)

    def get(self, digest: bytes) -> Stored | None:
        return self._files.get(digest)

    def has(self, number: int, digest: bytes) -> bool:
        """True if the group's entry is in a file."""
        stored = self._files.get(digest)
        return stored is not None and number in stored.numbers

    def touch(self, digest: bytes) -> None:
        """Record a use."""
        if digest in self._files:
            self._files.move_to_end(digest)
            self._shares.touch(self._owners.get(digest), digest)

    def owner(self, digest: bytes) -> Owner | None:
        return self._owners.get(digest)

    def common(self, digest: bytes) -> None:
        """Charge nobody with a file."""
        self._shares.remove(self._owners.pop(digest, None), digest)

    def add(self, digest: bytes, stored: Stored, owner: Owner | None = None) -> None:
        self.forget(digest)
        if owner is not None:
            self._owners[digest] = owner
            self._shares.add(owner, digest, _on_disk(stored.size))
        self._files[digest] = stored
        self._removed.pop(digest, None)
        if self.listener is not None:
            self.listener.came(digest)
        self.num_bytes += _on_disk(stored.size)

    def make_room(self, size: int, charged: Mapping[Owner | None, int] = NOBODYS) -> list[tuple[bytes, Stored]]:
        """The files that have to go for so many bytes more, of which owners are charged with some."""
        gone = list[tuple[bytes, Stored]]()
        for owner, part in charged.items():
            self._shares.charge(owner, part)
        while self._files and self.num_bytes + _on_disk(size) > self.max_bytes:
            surplus = next(self._shares.surplus(), None)
            digest = next(iter(self._files)) if surplus is None else surplus
            gone.append((digest, self._files[digest]))
            self.forget(digest)
            self.evicted_surplus += surplus is not None
        for owner, part in charged.items():
            self._shares.charge(owner, -part)
        self.evicted += len(gone)
        return gone

    def forget(self, digest: bytes) -> Stored | None:
        """Let a file go; return it, if there was one."""
        stored = self._files.pop(digest, None)
        if stored is not None:
            self.common(digest)
            self.num_bytes -= _on_disk(stored.size)
            self._removed[digest] = None
            if self.listener is not None:
                self.listener.went(digest)
        return stored

    def drain_removed(self) -> list[bytes]:
        """Digests that left since the last call and are not back."""
        removed = list(self._removed)
        self._removed.clear()
        return removed


def _on_disk(size: int) -> int:
    return -(-size // PAGE) * PAGE
