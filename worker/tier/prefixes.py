"""The prefixes that the tiers below a pool can resume.

With one KV group any block of tokens will do. With several a prefix needs the windows and states at its end, too, and a block
is of use while such an end is there or behind it. A tier is told digests, no chains: the pool knows those of what is stored, and
a prompt those of what files had before this process began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Protocol

from engine.cache.block_pool import BlockPool
from engine.cache.changes import Chain, Listener
from engine.cache.resumable import ResumablePrefixes
from engine.groups import resumable


def count_resumable(pool: BlockPool, digests: ListOf[bytes], has: Callable[[int, bytes], bool]) -> int:
    """The longest prefix of blocks that a sequence can go on from, where groups have what `has(number, digest)`."""
    most = next((at for at, digest in enumerate(digests) if not has(0, digest)), len(digests))
    return resumable(pool.groups[1:], pool.block_size, most, lambda number, at: has(number + 1, digests[at]))


class Blocks(Protocol):
    """A tier's blocks."""

    def __contains__(self, digest: bytes, /) -> bool: ...


class LowerPrefixes:
    """A tree of prefixes with the tiers' `gates`, in order. `has(number, digest)`: whether a tier has that group's entry."""

    def __init__(self, pool: BlockPool, has: Callable[[int, bytes], bool]) -> None:
        self.gates: list[Gate] = []
        self._pool, self._has = pool, has
        self._ends: set[bytes] = set()
        self._tree = ResumablePrefixes(self._came, self._went)
        self._changed: dict[bytes, None] = {}

    def __contains__(self, digest: bytes) -> bool:
        """True if the block, once it is found, is a prefix's that can be resumed."""
        return not self._pool.needed or digest in self._tree

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._tree)

    def gate(self, blocks: Blocks) -> Gate:
        """The listener of the next tier's blocks."""
        self.gates.append(Gate(self, blocks))
        return self.gates[-1]

    def stored(self, digest: bytes) -> None:
        """Hear of entries that a tier has now, and the pool still."""
        if self._is_new_end(digest) and digest in self._pool.prefixes:
            self._ends.add(digest)
            self._tree.add_from(self._pool.prefixes, digest)

    def asked(self, chain: Chain) -> None:
        """Hear of a prompt's blocks, which other processes may have stored; of one that a peer asks for, without tokens."""
        for at, digest in enumerate(chain.digests):
            if self._is_new_end(digest):
                self._ends.add(digest)
                self._tree.add(chain.digests, at + 1)
        if chain.token_ids:
            self._pool.changes.learn(chain)

    def lost(self, digest: bytes) -> None:
        """Hear of a block that a tier has no more."""
        if digest in self._ends and not self._is_end(digest):
            self._ends.remove(digest)
            self._tree.remove(digest)

    def forgotten(self, digest: bytes) -> None:
        """Hear of a block that the pool has no more: it is found in a lower tier, if at all."""
        if digest in self._tree:
            self._changed[digest] = None

    def drain_changed(self) -> list[bytes]:
        """Digests of prefixes that can be resumed since the last call, or no more, or elsewhere."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def _is_end(self, digest: bytes) -> bool:
        return all(self._has(number, digest) for number in (0, *self._pool.needed))

    def _is_new_end(self, digest: bytes) -> bool:
        return bool(self._pool.needed) and digest not in self._ends and self._is_end(digest)

    def _came(self, digest: bytes) -> None:
        self._changed[digest] = None
        for gate in self.gates:
            if digest in gate.blocks:
                gate.came(digest)

    def _went(self, digest: bytes) -> None:
        self._changed[digest] = None
        for gate in self.gates:
            if gate.told is not None:
                gate.told.went(digest)


@dataclass(slots=True, eq=False)
class Gate:
    """The listener of one tier's blocks: it repeats those of prefixes that can be resumed."""

    prefixes: LowerPrefixes
    blocks: Blocks
    told: Listener | None = None

    def has(self, digest: bytes) -> bool:
        return digest in self.blocks and digest in self.prefixes

    def came(self, digest: bytes) -> None:
        if self.told is not None and digest in self.prefixes:
            self.told.came(digest)

    def went(self, digest: bytes) -> None:
        if self.told is not None:
            self.told.went(digest)
        self.prefixes.lost(digest)
