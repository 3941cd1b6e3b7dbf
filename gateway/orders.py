"""What a gateway tells workers about its requests."""

from __future__ import annotations

import contextlib

from common import subjects
from common.bus import Bus
from common.errors import UnavailableError
from common.messages import ANYBODY_THERE, Ack, Cancel, Received, Resend, worker_reply_decoder
from common.peers import Peers

CANCEL_TRIES = 3
CANCEL_TIMEOUT_S = 0.3
PROBE_TIMEOUT_S = 0.5


class Orders:
    """Messages to workers, with their time-outs and repetitions."""

    def __init__(self, bus: Bus, peers: Peers) -> None:
        self._bus = bus
        self._peers = peers

    async def cancel(self, worker: str, cancel: Cancel) -> None:
        """Until the worker has acked it or is gone."""
        for _ in range(CANCEL_TRIES):
            with contextlib.suppress(UnavailableError):
                await self._bus.request(
                    subjects.worker(worker), cancel, worker_reply_decoder, timeout_s=CANCEL_TIMEOUT_S
                )
                return
            if worker not in self._peers.states:
                return

    async def received(self, worker: str, received: Received) -> None:
        """The last token arrived: the worker may forget the stream."""
        with contextlib.suppress(UnavailableError):
            await self._bus.publish(subjects.worker(worker), received)

    async def resend(self, worker: str, resend: Resend, *, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Ask for the tokens from a position on; whether the worker knows the stream. Raises UnavailableError."""
        reply = await self._bus.request(subjects.worker(worker), resend, worker_reply_decoder, timeout_s=timeout_s)
        return isinstance(reply, Ack) and reply.known

    async def ask(self, worker: str, *, timeout_s: float) -> None:
        """Whether the worker is there. Raises NobodyListensError, or UnavailableError without an answer in time."""
        await self.resend(worker, ANYBODY_THERE, timeout_s=timeout_s)
