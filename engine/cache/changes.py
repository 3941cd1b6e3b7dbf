"""News of a pool: digests that came and left, for those who repeat them elsewhere, and the ages of its blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages import AGE_BOUNDS_S, Ages

# One block of so many is watched for its age, so that a long prompt's release costs next to nothing.
WATCHED = 16


@dataclass(frozen=True, slots=True)
class Chain:
    """Digests of the blocks of a prompt or a longer sequence, and its tokens."""

    root: bytes
    digests: Sequence[bytes]
    token_ids: Sequence[int]
    block_size: int


class Listener(Protocol):
    """A reader of the changes of one tier, each as it happens."""

    def came(self, digest: bytes) -> None:
        """A prefix that ends with this block is found here from now on."""

    def went(self, digest: bytes) -> None:
        """It is found here no more."""


class Journal(Listener, Protocol):
    """A reader of a pool's changes that also needs to know which tokens a block has."""

    def learn(self, chain: Chain, *, first: int) -> None:
        """Hear of a chain's blocks before they come, from number `first` on."""


class Changes:
    """Changes since the last `drain`, without what came and went in between; a journal hears all of them."""

    def __init__(self) -> None:
        self.journal: Journal | None = None
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def learn(self, chain: Chain, *, first: int = 0) -> None:
        """Tell a journal, if there is one, the tokens of blocks that come now."""
        if self.journal is not None:
            self.journal.learn(chain, first=first)

    def came(self, digest: bytes) -> None:
        _note(digest, happened=self._added, undone=self._removed)
        if self.journal is not None:
            self.journal.came(digest)

    def went(self, digest: bytes) -> None:
        _note(digest, happened=self._removed, undone=self._added)
        if self.journal is not None:
            self.journal.went(digest)

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """Return (digests added, digests removed) since the last call."""
        events = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return events


def _note(digest: bytes, *, happened: dict[bytes, None], undone: dict[bytes, None]) -> None:
    """Record an event, or cancel its unreported opposite."""
    if digest in undone:
        del undone[digest]
    else:
        happened[digest] = None


class _Histogram:
    def __init__(self) -> None:
        self._counts, self._sum_s = [0] * (len(AGE_BOUNDS_S) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(AGE_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def told(self) -> Ages:
        return Ages(counts=[*self._counts], sum_s=self._sum_s)


class BlockAges:
    """The ages of the watched blocks: how long they are kept, and idle before they go or are found again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._born: dict[int, float] = {}  # first release of what a block holds
        self._idle_since: dict[int, float] = {}
        self._lifetime, self._idle, self._reuse = _Histogram(), _Histogram(), _Histogram()

    def released(self, blocks: Iterable[int]) -> None:
        if watched := _watched(blocks):
            now = self._clock()
            for block in watched:
                self._idle_since[block] = now
                self._born.setdefault(block, now)

    def found(self, blocks: Iterable[int]) -> None:
        if watched := [block for block in _watched(blocks) if block in self._idle_since]:
            now = self._clock()
            for block in watched:
                self._reuse.add(now - self._idle_since.pop(block))

    def evicted(self, blocks: Iterable[int]) -> None:
        if watched := [block for block in _watched(blocks) if block in self._idle_since]:
            now = self._clock()
            for block in watched:
                self._idle.add(now - self._idle_since[block])
                self._lifetime.add(now - self._born[block])
                self.forget(block)

    def forget(self, block: int) -> None:
        self._idle_since.pop(block, None)
        self._born.pop(block, None)

    def told(self) -> tuple[Ages, Ages, Ages]:
        """Lifetime, idle time at eviction, and time between uses."""
        return self._lifetime.told(), self._idle.told(), self._reuse.told()


def _watched(blocks: Iterable[int]) -> list[int]:
    return [block for block in blocks if not block % WATCHED]
