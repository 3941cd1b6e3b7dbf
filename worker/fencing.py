"""Fences: cancel requests whose gateway is gone, or that were moved away from here.

A silent or replaced gateway waits for nothing. A worker without the bus stops before others give its work away: after
`FENCE_AFTER_S`, they after 4 s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum, auto

from common.bus import Bus
from common.messages import GatewayState
from common.peers import CONTESTED
from worker.identity import Identity
from worker.roles import CancelReason, Roles

log = logging.getLogger("baton.worker")

GATEWAY_SILENT_S = 5.0
FENCE_AFTER_S = 3.0  # time cut off from the bus
MAX_NAMED = 100


class Heard(Enum):
    """The verdict on a gateway's heartbeat."""

    NEW = auto()
    KNOWN = auto()
    REPLACED = auto()  # its previous process is gone
    CONTESTED = auto()  # the previous process lives: two claim the name


class GatewayTable:
    """The last heartbeat of each gateway. Without clock and I/O."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # (incarnation, instant); 0 before the first heartbeat
        self._before: dict[str, int] = {}  # the incarnation that it replaced

    def expect(self, gateway: str, now: float) -> None:
        """Expect heartbeats of this gateway, of which a job was claimed."""
        self._seen.setdefault(gateway, (0, now))

    def saw(self, gateway: str, incarnation: int, now: float) -> Heard:
        known = self._seen.get(gateway)
        self._seen[gateway] = (incarnation, now)
        if known is None:
            return Heard.NEW
        if known[0] in (0, incarnation):
            return Heard.KNOWN
        before, self._before[gateway] = self._before.get(gateway), known[0]
        return Heard.CONTESTED if before == incarnation else Heard.REPLACED

    def forget_silent(self, now: float) -> list[str]:
        """Drop the gateways that were silent for too long, and return them."""
        silent = [gateway for gateway, (_, seen_at) in self._seen.items() if now - seen_at > GATEWAY_SILENT_S]
        for gateway in silent:
            del self._seen[gateway]
            self._before.pop(gateway, None)
        return silent

    def excuse(self, now: float) -> None:
        """Restart the silence timers: without the bus no gateway can be heard."""
        self._seen = {gateway: (incarnation, now) for gateway, (incarnation, _) in self._seen.items()}


class Fencing:
    """Cancels requests of lost gateways, and all requests if this worker is cut off for too long."""

    def __init__(self, *, bus: Bus, roles: Roles, identity: Identity, clock: Callable[[], float] | None = None) -> None:
        self._bus = bus
        self._identity = identity
        self._roles = roles
        self._clock = clock or time.monotonic
        self._gateways = GatewayTable()
        self._contested: set[str] = set()  # already logged
        self._connected_at = self._clock()

    def expect(self, gateway: str) -> None:
        """Expect heartbeats of this gateway, of which a job was claimed."""
        self._gateways.expect(gateway, self._clock())

    def saw(self, state: GatewayState) -> Heard:
        """Take a heartbeat. The caller cancels the requests of a REPLACED gateway."""
        self._identity.heard(state)
        heard = self._gateways.saw(state.gateway, state.incarnation, self._clock())
        if heard is Heard.CONTESTED and state.gateway not in self._contested and len(self._contested) < MAX_NAMED:
            self._contested.add(state.gateway)
            log.error("gateway.contested", extra={"gateway": state.gateway, "remedy": CONTESTED})
        return heard

    async def watch(self) -> None:
        """Check gateways and the bus; call it every second."""
        now = self._clock()
        if self._bus.connected:
            self._connected_at = now
            for gateway in self._gateways.forget_silent(now):
                self._identity.forget(gateway)
                await self.cancel(gateway)
            return
        self._gateways.excuse(now)
        if now - self._connected_at > FENCE_AFTER_S:
            for role in self._roles.all:
                await role.cancel_all(CancelReason.BUS_LOST)

    async def cancel(self, gateway: str) -> None:
        """Cancel the requests of this gateway."""
        log.warning("gateway.lost", extra={"gateway": gateway})
        for role in self._roles.all:
            await role.cancel_all(CancelReason.GATEWAY_LOST, gateway=gateway)
