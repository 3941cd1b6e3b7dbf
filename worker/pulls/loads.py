"""Loads for others: what lower tiers have of a prompt comes back for a worker that computes it, or asks for its beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.sequence import Sequence
from worker.tier.host_tier import HostTier
from worker.tier.in_flight import Lent


class Loads:
    """The loads that questions of other workers wait for."""

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self._landed = asyncio.Event()
        tier.also_wake(self._landed.set)

    async def bring(
        self, prefix: Sequence | Lent, *, within_s: float, has_room: Callable[[], bool], reads: bool = True
    ) -> None:
        """Return once the pool has what tiers had, or after so many seconds: what comes later is found by the next prompt.

        Not `reads`: without what files have.
        """
        tier = self.tier
        try:
            async with asyncio.timeout(within_s):
                while tier.is_loading(prefix, has_room=has_room, is_hit=False, reads=reads):
                    self._landed.clear()
                    await self._landed.wait()
        except TimeoutError:
            pass  # it becomes cached once it landed
        finally:
            tier.left(prefix)
