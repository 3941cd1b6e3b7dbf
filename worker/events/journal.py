"""The blocks that a worker has, in each tier, and the changes that its publisher has not sent yet.

The event loop writes; the publisher's thread takes changes from the other end of a bounded queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.blocks import pack_tokens
from engine.cache.changes import Chain
from worker.events.wire import CLEARED, Block, Change

SPARE = 1024  # blocks, beside twice those that pruning kept


@dataclass(slots=True)
class _Known:
    block: Block
    media: set[str] = field(default_factory=set)


class Journal:
    """Hears of the pool's changes as the medium "GPU", by vLLM's name for it; `medium` is for the tiers below.

    Where the publisher falls behind by more than `most` changes, they give way to a clearing and all that is here then: a
    reader's picture is late, and never wrong for long.
    """

    def __init__(self, *, has: Callable[[bytes], bool], plain_root: bytes, most: int) -> None:
        """`has(digest)`: the pool has that block. `plain_root`: of chains without an adapter or a tenant's salt."""
        self.waiting: deque[Change] = deque()
        self._has, self._plain_root, self._most, self._bound = has, plain_root, most, most
        self._known: dict[bytes, _Known] = {}
        self._prune_above = SPARE
        self._pool = Medium(self, "GPU", has)
        self._media: list[Medium] = []
        self.waiting.append(CLEARED)

    def learn(self, chain: Chain, *, first: int) -> None:
        """Besides, tell which tiers had these blocks before this process knew their tokens."""
        if len(self._known) > self._prune_above:
            self._known = {key: known for key, known in self._known.items() if known.media or self._has(key)}
            self._prune_above = 2 * len(self._known) + SPARE
        size, extra = chain.block_size, "" if chain.root == self._plain_root else chain.root.hex()
        for at in range(first, len(chain.digests)):
            digest = chain.digests[at]
            if digest in self._known:
                continue
            tokens = pack_tokens(chain.token_ids[at * size : (at + 1) * size])
            block = Block(digest, chain.digests[at - 1] if at else None, tokens, "" if at else extra)
            self._known[digest] = _Known(block)
            for medium in self._media:
                if medium.has(digest):
                    medium.came(digest)

    def came(self, digest: bytes) -> None:
        self._pool.came(digest)

    def went(self, digest: bytes) -> None:
        self._pool.went(digest)

    def medium(self, name: str, has: Callable[[bytes], bool]) -> Medium:
        """The listener of another tier. `has(digest)`: that block is there."""
        self._media.append(Medium(self, name, has))
        return self._media[-1]

    def retell(self) -> None:
        """Tell everything again, for who lacks the beginning."""
        self.waiting.clear()
        self.waiting.append(CLEARED)
        for known in self._known.values():
            self.waiting.extend(Change(medium, known.block, True) for medium in sorted(known.media))
        self._bound = self._most + len(self.waiting)

    def entered(self, digest: bytes, medium: str) -> None:
        known = self._known.get(digest)
        if known is None or medium in known.media:
            return
        known.media.add(medium)
        self._tell(Change(medium, known.block, True))

    def left(self, digest: bytes, medium: str) -> None:
        known = self._known.get(digest)
        if known is None or medium not in known.media:
            return
        known.media.remove(medium)
        # A block without its windows or states may be found again once they are back.
        if not known.media and not self._has(digest):
            del self._known[digest]
        self._tell(Change(medium, known.block, False))

    def _tell(self, change: Change) -> None:
        if len(self.waiting) < self._bound:
            self.waiting.append(change)
        else:
            self.retell()


@dataclass(frozen=True, slots=True)
class Medium:
    """The listener of one tier."""

    journal: Journal
    name: str
    has: Callable[[bytes], bool]

    def came(self, digest: bytes) -> None:
        self.journal.entered(digest, self.name)

    def went(self, digest: bytes) -> None:
        self.journal.left(digest, self.name)
