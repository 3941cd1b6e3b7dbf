"""Digests that came to a pool and left it, for those who repeat them elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
