"""Charges to release: batched for a moment, and kept while Redis is down.

Giving back is idempotent and names its attempt, so one that comes late, twice or out of order takes nobody else's place. What
is lost with its gateway ends with the request's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from common.errors import UnavailableError
from gateway.request.placement import Charged

COLLECT_S = 0.005
AGAIN_S = 1.0
MAX_KEPT = 10_000  # attempts; older ones expire at their deadlines
CLOSE_S = 1.0


class ReleaseStore(Protocol):
    async def release(self, charges: Sequence[Charged]) -> int:
        """Release charges; return how many were processed, from the first on. Raises UnavailableError."""
        ...


class Releases:
    """The batcher: one call at a time; releases that come meanwhile go with the next."""

    def __init__(self, store: ReleaseStore) -> None:
        self._store = store
        self._kept: dict[tuple[str, int], Charged] = {}
        self._sending: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, charged: Charged) -> None:
        """Queue a release; does not wait."""
        key = charged.request_id, charged.attempt
        before = self._kept.get(key)
        if before is not None:
            stages = tuple(dict.fromkeys((*before.stages, *charged.stages)))
            charged = replace(charged, stages=stages, workers=(*before.workers, *charged.workers))
        elif len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = charged
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_often())

    async def close(self) -> None:
        """Send the rest, if Redis accepts it soon."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._kept:
                    await self._send()

    async def _send_often(self) -> None:
        try:
            await asyncio.sleep(COLLECT_S)
            while self._kept:
                try:
                    await self._send()
                except UnavailableError:
                    await asyncio.sleep(AGAIN_S)
                await asyncio.sleep(COLLECT_S)
        finally:
            self._sending = None

    async def _send(self) -> None:
        charges = list(self._kept.values())
        done = await self._store.release(charges)
        for one in charges[:done]:
            key = one.request_id, one.attempt
            if self._kept.get(key) is one:  # otherwise more was queued meanwhile
                del self._kept[key]
