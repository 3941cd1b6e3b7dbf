"""The fleet for a console: workers, gateways and their activity, and orders to workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from common import subjects
from common.bus import Bus, Subscription
from common.errors import UnavailableError
from common.messages import (
    Drain,
    GatewayState,
    PlannerState,
    RolesReply,
    SetRoles,
    WorkerState,
    gateway_state_decoder,
    planner_state_decoder,
    worker_reply_decoder,
)
from common.peers import Peers
from gateway.admission.capacity import HeardGateways
from gateway.console.messages import ConsoleAsk, ConsoleTold, console_ask_decoder, console_told_decoder
from gateway.console.recorder import LOOK_EVERY_S, Recorder

log = logging.getLogger("baton.console")

ORDER_TIMEOUT_S = 5.0  # a new prefill worker opens links first
ASK_TIMEOUT_S = 1.0  # slower gateways are left out of a picture
MAX_TOLD = 2 << 20  # bytes of one answer; the bus carries 8 MiB


class FleetControl:
    """The fleet: workers from `peers`, gateways from their heartbeats."""

    def __init__(self, bus: Bus, peers: Peers, *, gateway_id: str = "") -> None:
        self._bus = bus
        self._peers = peers
        self._gateway_id = gateway_id
        self._gateways = HeardGateways()
        self._subscriptions: list[Subscription] = []
        self._tell: Callable[[ConsoleAsk], Awaitable[Any]] | None = None
        self._recorder: Recorder | None = None
        self._looking: asyncio.Task[None] | None = None
        self.leaving = asyncio.Event()  # set when the gateway stops: watchers must leave

    async def start(self) -> None:
        """Subscribe to gateways, and answer them."""
        self._subscriptions = [
            await self._bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self._gateways.saw),
            await self._bus.subscribe(subjects.PLANNER, planner_state_decoder, self._saw_planner),
        ]
        self._looking = asyncio.create_task(self._look())
        if self._gateway_id:
            await self._bus.serve(subjects.console(self._gateway_id), console_ask_decoder, self._asked)

    async def close(self) -> None:
        """Stop listening."""
        self.leaving.set()
        if self._looking is not None:
            self._looking.cancel()
        for subscription in self._subscriptions:
            await subscription.close()

    def workers(self) -> list[WorkerState]:
        """The live workers, by name."""
        return [state for _, state in sorted(self._peers.states.items())]

    def contested(self) -> frozenset[str]:
        """Names claimed by two workers."""
        return frozenset(self._peers.contested)

    def gateways(self) -> list[GatewayState]:
        """The live gateways, this one too, by name."""
        return self._gateways.states()

    # -- what is written down ------------------------------------------------------------------------------------------

    def record_with(self, recorder: Recorder) -> None:
        """Attach a recorder, which samples the fleet and hears planners."""
        self._recorder = recorder

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._recorder is not None:
                try:
                    self._recorder.look(self.workers(), self.gateways())
                except Exception:  # nobody would restart this task, and the next look may succeed
                    log.exception("console.look_failed")

    def _saw_planner(self, state: PlannerState) -> None:
        if self._recorder is not None:
            self._recorder.saw_planner(state)

    # -- other gateways ------------------------------------------------------------------------------------------------

    def answer_with(self, tell: Callable[[ConsoleAsk], Awaitable[Any]]) -> None:
        """Answer other gateways with JSON values."""
        self._tell = tell

    async def ask(self, message: ConsoleAsk) -> dict[str, Any]:
        """Other gateways' answers by id; silent ones are left out."""
        others = [state.gateway for state in self.gateways() if state.gateway != self._gateway_id]
        told = await asyncio.gather(*(self._ask(name, message) for name in others))
        return {name: answer for name, answer in zip(others, told, strict=True) if answer is not None}

    async def find(self, request_id: str) -> list[dict[str, Any]]:
        """Timelines of an answer, or of one choice, from the gateway that has them."""
        told = await self.ask(ConsoleAsk(request_id=request_id))
        return next((lines for lines in told.values() if lines), [])

    async def _ask(self, gateway: str, message: ConsoleAsk) -> Any:
        subject = subjects.console(gateway)
        try:
            reply = await self._bus.request(subject, message, console_told_decoder, timeout_s=ASK_TIMEOUT_S)
            return msgspec.json.decode(reply.json)
        except (UnavailableError, msgspec.DecodeError) as error:
            log.debug("console.no_answer", extra={"gateway": gateway, "error": str(error)[:200]})
            return None

    async def _asked(self, message: ConsoleAsk) -> ConsoleTold:
        told = msgspec.json.encode(await self._tell(message) if self._tell is not None else None)
        return ConsoleTold(json=told if len(told) <= MAX_TOLD else b"null")

    # -- workers -------------------------------------------------------------------------------------------------------

    async def set_roles(self, worker: str, roles: Sequence[str]) -> RolesReply:
        """Order `worker` to take new work of these roles only. Raises UnavailableError without an answer."""
        return await self._order(worker, SetRoles(roles=list(roles), reason="operator"))

    async def drain(self, worker: str, *, draining: bool) -> RolesReply:
        """Order `worker` to drain, or to take work again. Raises UnavailableError without an answer."""
        return await self._order(worker, Drain(draining=draining, reason="operator"))

    async def _order(self, worker: str, order: SetRoles | Drain) -> RolesReply:
        subject = self._peers.to(worker, self._gateway_id, subjects.order)
        reply = await self._bus.request(subject, order, worker_reply_decoder, timeout_s=ORDER_TIMEOUT_S)
        if not isinstance(reply, RolesReply):
            reply = RolesReply(accepted=False, roles=[], reason=f"{worker} does not know this order: update it")
        log.info("console.ordered", extra={"worker": worker, "order": order, "accepted": reply.accepted})
        return reply
