"""The policy of the file tier: which blocks have a file, and which give it up. No files, no threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from engine.cache.changes import Listener
from worker.tier.kv_files import Stored

PAGE = 4_096  # bytes that a file system gives out at a time


class FileBlocks:
    """Files by their block's digest, the one used longest ago first to go. They never have more than `max_bytes`."""

    def __init__(self, max_bytes: int, found: Mapping[bytes, Stored]) -> None:
        """`found`: what is there, the oldest first."""
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.evicted = 0
        self._files: OrderedDict[bytes, Stored] = OrderedDict()  # least recently used first
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

    def add(self, digest: bytes, stored: Stored) -> None:
        self.forget(digest)
        self._files[digest] = stored
        self._removed.pop(digest, None)
        if self.listener is not None:
            self.listener.came(digest)
        self.num_bytes += _on_disk(stored.size)

    def make_room(self, size: int) -> list[tuple[bytes, Stored]]:
        """The files that have to go for so many bytes more."""
        gone = list[tuple[bytes, Stored]]()
        while self._files and self.num_bytes + _on_disk(size) > self.max_bytes:
            digest, stored = next(iter(self._files.items()))
            self.forget(digest)
            gone.append((digest, stored))
        self.evicted += len(gone)
        return gone

    def forget(self, digest: bytes) -> Stored | None:
        """Let a file go; return it, if there was one."""
        stored = self._files.pop(digest, None)
        if stored is not None:
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
