"""What the prefix index in Redis has to be told of a pool: everything at first and after a loss, then what came and went."""

from __future__ import annotations

from engine.block_pool import BlockPool

MAX_GONE = 100_000  # of digests that could not be taken back yet; older ones wait for their TTL


class IndexNews:
    """Keeps what was not told: an announcement that failed may or may not have arrived."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._is_known = False
        self._gone: dict[bytes, None] = {}

    def forget(self) -> None:
        """The index lost what it was told, or may have: tell everything again."""
        self._is_known = False

    def next(self) -> tuple[list[bytes], list[bytes]]:
        """Digests to add and to remove, both empty when there is nothing to tell. To be followed by `told` once that is done."""
        added, removed = self._pool.drain_events()
        if not self._is_known:
            added = self._pool.cached_digests()
        self._gone |= dict.fromkeys(removed)
        for digest in added:
            self._gone.pop(digest, None)
        for digest in list(self._gone)[: max(0, len(self._gone) - MAX_GONE)]:
            del self._gone[digest]
        return added, list(self._gone)

    @property
    def is_known(self) -> bool:
        """Whether the index has all but the next news."""
        return self._is_known

    def told(self) -> None:
        """The index has what `next` returned."""
        self._is_known = True
        self._gone.clear()
