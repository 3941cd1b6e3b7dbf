"""Registration of workers in Redis by the gateways that hear them. Workers may write nothing there but news of their blocks.

Each gateway enters whom it hears; Redis skips those that another one entered a moment ago.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine

from common.errors import UnavailableError
from common.messages import WorkerState
from common.peers import Incarnation, Peers, incarnation_of
from gateway.placement.ledger import Ledger

log = logging.getLogger("baton.placement")

ENTER_S = 0.5
NEWS_S = 0.1  # until a worker's news is in the index
MORE_NEWS_S = 0.01
MAX_TOLD = 1_000  # incarnations with logged nonsense


class Enrolment:
    """Keeps the registry and the prefix index in sync with heartbeats and workers' news."""

    def __init__(self, ledger: Ledger, peers: Peers, *, gateway_id: str) -> None:
        self._ledger = ledger
        self._peers = peers
        self._gateway_id = gateway_id
        self._changed = asyncio.Event()
        self._gone: list[Incarnation] = []
        self._told: dict[Incarnation, None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._peers.on_joined(self._note_change)
        self._peers.on_changed(self._note_change)
        self._peers.on_lost(self._note_loss)
        loops: tuple[Coroutine[None, None, None], ...] = (self._enter_often(), self._listen_often())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _note_change(self, _: WorkerState) -> None:
        self._changed.set()

    def _note_loss(self, worker: str, number: int) -> None:
        self._gone.append(Incarnation(worker, number))
        self._changed.set()

    async def _enter_often(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ENTER_S):
                    await self._changed.wait()
            self._changed.clear()
            with contextlib.suppress(UnavailableError):
                await self.enter()

    async def enter(self) -> None:
        """Remove lost workers, and register all that are heard. Raises UnavailableError."""
        gone, self._gone = self._gone, []
        for one in gone:
            await self._ledger.leave(*one)
        states = self._peers.states
        for worker in await self._ledger.enter(list(states.values()), gateway=self._gateway_id):
            if worker in states:
                self._tell(incarnation_of(states[worker]))

    def _tell(self, one: Incarnation) -> None:
        """Log one line for each incarnation."""
        if one not in self._told:
            remedy = "its heartbeat has figures that are none; it gets no place from Redis"
            log.warning("placement.worker_refused", extra={"worker": one.worker, "remedy": remedy})
        self._told[one] = None
        while len(self._told) > MAX_TOLD:
            del self._told[next(iter(self._told))]

    async def _listen_often(self) -> None:
        while True:
            more = False
            with contextlib.suppress(UnavailableError):
                more = await self.listen()
            await asyncio.sleep(MORE_NEWS_S if more else NEWS_S)

    async def listen(self) -> bool:
        """Read the news of all workers that are heard. Raises UnavailableError."""
        workers = list(self._peers.states)
        random.shuffle(workers)  # a call takes only some of them
        return await self._ledger.take_news(workers)
