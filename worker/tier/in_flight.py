"""Blocks on their way between a pool and host memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from engine.groups import Entry
from engine.sequence import Hold
from worker.tier.host_blocks import HostBlock
from worker.tier.host_store import Write


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """A prefix that a peer asks for: its tokens are not known here."""

    digests: list[bytes]
    hash_root: bytes = b""
    token_ids: tuple[int, ...] = ()
    hold: None = None


@dataclass(slots=True, eq=False)
class Store:
    """A block on its way into slots."""

    write: Write
    entries: dict[int, Entry]
    known: HostBlock | None  # has the other groups' entries
    was_found: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry on its way into the pool."""

    number: int
    at: int
    entry: Entry
    source: HostBlock


@dataclass(slots=True, eq=False)
class Load:
    """A prefix on its way into the pool, with references on all of its blocks until then."""

    digests: list[bytes] = field(default_factory=list)
    held: list[Entry] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    hold: Hold | None = None  # the prompt's: its tenant is charged
    is_hit: bool = True  # the prompt is computed here
    is_over: bool = False

    def brings(self, digest: bytes) -> bool:
        return not self.is_over and digest in self.digests

    @property
    def blocks(self) -> list[int]:
        return [*chain(*self.held, *(piece.entry for piece in self.pieces))]
