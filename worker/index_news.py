"""Updates of the prefix index in Redis: the whole pool at first, then its changes."""

from __future__ import annotations

from engine.cache.block_pool import BlockPool

MAX_GONE = 100_000  # digests to remove; older ones expire by their TTL


class IndexNews:
    """Unconfirmed updates: a failed announcement may or may not have arrived."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._is_known = False
        self._gone: dict[bytes, None] = {}

    def forget(self) -> None:
        """Announce everything again: the index may have lost it."""
        self._is_known = False

    def next(self) -> tuple[list[bytes], list[bytes]]:
        """Digests to add and to remove. Call `told` once the index has them."""
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
        """True if the index has everything but the next update."""
        return self._is_known

    def told(self) -> None:
        """Confirm what `next` returned."""
        self._is_known = True
        self._gone.clear()
