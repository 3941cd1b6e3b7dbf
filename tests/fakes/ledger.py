"""`gateway.placement.placer.PlacementStore` in memory: what is charged shows, and placements may be scripted."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import UnavailableError
from gateway.placement.ledger import PlacementRequest
from gateway.request.placement import Charged, Placement


class MemoryLedger:
    """Answers with the next of `placements`; without one it is away, and the gateway chooses by itself.

    A scripted placement is charged, until it is released.
    """

    def __init__(self) -> None:
        self.placements: list[Placement] = []
        self.requests: list[PlacementRequest] = []
        self.charged: set[tuple[str, int, str]] = set()  # request, attempt, stage
        self.released: list[tuple[str, int, str]] = []

    async def place(self, request: PlacementRequest) -> Placement:
        self.requests.append(request)
        if not self.placements:
            raise UnavailableError("Redis is away")
        self.charged |= {(request.request_id, request.attempt, stage) for stage in ("prefill", "decode")}
        return self.placements.pop(0)

    async def release(self, charges: Sequence[Charged]) -> int:
        for one in charges:
            for stage in one.stages:
                self.released.append((one.request_id, one.attempt, stage))
                self.charged.discard((one.request_id, one.attempt, stage))
        return len(charges)
