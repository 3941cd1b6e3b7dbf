"""What an operator may tell a worker: other roles, and to take no new work. And what gateways say of themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from common import subjects
from common.bus import Bus, Subscription
from common.messages import (
    Drain,
    GatewayState,
    RolesReply,
    SetRoles,
    WorkerState,
    gateway_state_decoder,
    worker_reply_decoder,
)
from common.peers import Peers
from gateway.fleet import SILENT_S

log = logging.getLogger("baton.console")

ORDER_TIMEOUT_S = 5.0  # a worker that gains prefill opens links first: 2 s at most


class FleetControl:
    """Workers through `peers`, gateways by their heartbeats on the bus."""

    def __init__(self, bus: Bus, peers: Peers) -> None:
        self._bus = bus
        self._peers = peers
        self._gateways: dict[str, tuple[float, GatewayState]] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Listen for gateways."""
        self._subscription = await self._bus.subscribe(
            subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self._saw
        )

    async def close(self) -> None:
        """Stop listening."""
        if self._subscription is not None:
            await self._subscription.close()

    def workers(self) -> list[WorkerState]:
        """The live workers, by name."""
        return [state for _, state in sorted(self._peers.states.items())]

    def gateways(self) -> list[GatewayState]:
        """The live gateways, this one too, by name."""
        now = time.monotonic()
        self._gateways = {name: seen for name, seen in self._gateways.items() if now - seen[0] < SILENT_S}
        return [state for _, (_, state) in sorted(self._gateways.items())]

    async def set_roles(self, worker: str, roles: Sequence[str]) -> RolesReply:
        """Let `worker` take new work of these roles alone. Raises UnavailableError when it does not answer."""
        return await self._order(worker, SetRoles(roles=list(roles), reason="operator"))

    async def drain(self, worker: str, *, draining: bool) -> RolesReply:
        """Let `worker` take no new work, or take it again. Raises UnavailableError when it does not answer."""
        return await self._order(worker, Drain(draining=draining, reason="operator"))

    async def _order(self, worker: str, order: SetRoles | Drain) -> RolesReply:
        reply = await self._bus.request(subjects.worker(worker), order, worker_reply_decoder, timeout_s=ORDER_TIMEOUT_S)
        if not isinstance(reply, RolesReply):
            reply = RolesReply(accepted=False, roles=[], reason=f"{worker} does not know this order: update it")
        log.info("console.ordered", extra={"worker": worker, "order": order, "accepted": reply.accepted})
        return reply

    def _saw(self, state: GatewayState) -> None:
        self._gateways[state.gateway] = time.monotonic(), state
