"""Messages of this gateway: orders to workers, and its heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass

import msgspec

from common import subjects
from common.bus import Bus
from common.errors import UnavailableError
from common.messages import ANYBODY_THERE, Ack, Cancel, Received, Resend, worker_reply_decoder
from common.peers import Peers
from common.tasks import Ready
from gateway.admission.rooms import WaitingRooms
from gateway.lifecycle.running import Records, Running
from gateway.placement.hosts import Hosts
from gateway.placement.placer import Placer

CANCEL_TRIES = 3
CANCEL_TIMEOUT_S = 0.3
PROBE_TIMEOUT_S = 0.5
HEARTBEAT_PERIOD_S = 1.0


class Orders:
    """Orders to workers, with timeouts and retries."""

    def __init__(self, bus: Bus, peers: Peers, *, gateway_id: str) -> None:
        self._bus = bus
        self._peers = peers
        self._gateway_id = gateway_id

    async def cancel(self, worker: str, cancel: Cancel) -> None:
        """Repeat until the worker acknowledges or is gone."""
        cancel = msgspec.structs.replace(cancel, gateway=self._gateway_id)
        for _ in range(CANCEL_TRIES):
            with contextlib.suppress(UnavailableError):
                await self._bus.request(self._to(worker), cancel, worker_reply_decoder, timeout_s=CANCEL_TIMEOUT_S)
                return
            if worker not in self._peers.states:
                return

    def received(self, worker: str, received: Received) -> Awaitable[None]:
        """Tell the worker to forget the stream: its last token is here."""
        received = msgspec.structs.replace(received, gateway=self._gateway_id)
        try:
            return self._bus.publish(self._to(worker), received)
        except UnavailableError:
            return Ready(None)

    async def resend(self, worker: str, resend: Resend, *, timeout_s: float = PROBE_TIMEOUT_S) -> Ack:
        """Request the tokens from a position on. Returns the worker's reply about the stream; raises UnavailableError."""
        reply = await self._bus.request(self._to(worker), resend, worker_reply_decoder, timeout_s=timeout_s)
        return reply if isinstance(reply, Ack) else Ack(known=False)

    async def ask(self, worker: str, *, timeout_s: float) -> None:
        """Ping the worker. Raises NobodyListensError, or UnavailableError without a reply in time."""
        await self.resend(worker, ANYBODY_THERE, timeout_s=timeout_s)

    def _to(self, worker: str) -> str:
        return self._peers.to(worker, self._gateway_id, subjects.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The ways to workers: the bus, the choice among them, and the orders to one."""

    bus: Bus
    placer: Placer
    orders: Orders


class Heartbeat:
    """Publishes this gateway's state. Workers cancel the requests of a silent gateway."""

    def __init__(self, bus: Bus, running: Running, rooms: WaitingRooms, records: Records, hosts: Hosts) -> None:
        self._bus = bus
        self._hosts = hosts
        self._running = running
        self._rooms = rooms
        self._records = records

    async def run(self, gateway_id: str, incarnation: int) -> None:
        """Send heartbeats until cancelled; one at once for a new wish."""
        while True:
            with contextlib.suppress(UnavailableError):
                state = self._records.heartbeat(gateway_id, incarnation, self._running)
                state = self._rooms.tell(state, self._running)
                levels = {self._hosts.their_name(model): level for model, level in state.levels.items()}
                state = msgspec.structs.replace(state, wanted=self._hosts.wanted(), levels=levels)
                await self._bus.publish(subjects.gateway_heartbeat(gateway_id), state)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hosts.news.wait(), HEARTBEAT_PERIOD_S)
