"""Streams of the Batch API, in memory instead of JetStream."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gateway.keeping.streams import Stored


class StreamsInMemory:
    """The part of `KeptStreams` that files and new batches need."""

    def __init__(self) -> None:
        self._kept: dict[str, Stored] = {}

    async def create(self, subject: str, data: bytes) -> bool:
        if subject in self._kept:
            return False
        self._kept[subject] = Stored(subject=subject, seq=len(self._kept) + 1, data=data)
        return True

    async def get(self, subject: str) -> Stored | None:
        return self._kept.get(subject)

    async def scan(self, subject: str) -> AsyncGenerator[Stored, None]:
        beginning = subject.removesuffix("*")
        for stored in [self._kept[name] for name in self._kept if name.startswith(beginning)]:
            yield stored

    async def used_bytes(self) -> int:
        return sum(len(stored.data) for stored in self._kept.values())

    async def purge(self, subject: str) -> None:
        beginning = subject.removesuffix("*")
        self._kept = {name: stored for name, stored in self._kept.items() if not name.startswith(beginning)}
