"""Prefixes that a sequence can resume, or that begin such a one.

A tree of digests. A node stands for a prefix by its last block's digest, and is there while it is an end, where a sequence can
go on, or has an end behind it. Adding and removing an end costs O(1), besides O(1) for each node that comes or goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Node:
    parent: bytes | None
    count: int = 1  # itself if it is resumable, plus its direct children


class ResumablePrefixes:
    """`came(digest)` and `went(digest)` are called as nodes come and go."""

    def __init__(self, came: Callable[[bytes], None], went: Callable[[bytes], None]) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._came = came
        self._went = went

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._nodes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._nodes)

    def add(self, digests: Sequence[bytes], count: int) -> None:
        """Mark the prefix with the first `count` of these digests as resumable."""
        first = count
        while first and digests[first - 1] not in self._nodes:
            first -= 1
        if first:
            self._nodes[digests[first - 1]].count += 1
        for at in range(first, count):
            self._nodes[digests[at]] = _Node(digests[at - 1] if at else None)
            self._came(digests[at])

    def add_from(self, other: ResumablePrefixes, digest: bytes) -> None:
        """Mark a prefix as resumable that is a node of another tree."""
        path = list[bytes]()
        at: bytes | None = digest
        while at is not None and at not in self._nodes:
            path.append(at)
            at = other._nodes[at].parent
        if at is not None:
            self._nodes[at].count += 1
        for fresh in reversed(path):
            self._nodes[fresh] = _Node(other._nodes[fresh].parent)
            self._came(fresh)

    def remove(self, digest: bytes) -> None:
        """Unmark this prefix as resumable."""
        last: bytes | None = digest
        while last is not None:
            node = self._nodes[last]
            node.count -= 1
            if node.count:
                return
            del self._nodes[last]
            self._went(last)
            last = node.parent
