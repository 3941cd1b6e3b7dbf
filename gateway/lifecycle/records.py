"""Records of requests: time lines, service levels, traces, counts of events, and the tasks that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from common.errors import ServingError
from common.messages import GatewayState
from common.tasks import Ready
from gateway.observe.attainment import Attainment, ServiceLevels
from gateway.observe.spans import RequestSpans
from gateway.request.active import ActiveRequest
from gateway.request.timeline import Timelines

log = logging.getLogger("baton.requests")


class Event(NamedTuple):
    """Something that happened to a request of a model; "" is no particular model."""

    model: str
    name: str  # "placed:<reason>", "retries", "quarantined", ...


class Records:
    """Records the start and the end of requests."""

    def __init__(self, *, spans: RequestSpans, levels: ServiceLevels, clock: Callable[[], float]) -> None:
        self.timelines = Timelines()
        self._spans = spans
        self._attainment = Attainment(levels, started_at=clock())
        self._clock = clock
        self.timelines.on_end(spans.record)

    def started(self, request: ActiveRequest) -> None:
        self.timelines.start(request.timeline)

    def not_started(self, request: ActiveRequest, error: BaseException) -> None:
        """Record a request whose first attempt could not be queued: it counts for no service level."""
        self.timelines.end(request.timeline, error=error)

    def ended(self, request: ActiveRequest, error: ServingError | None, *, cancelled: str = "") -> None:
        self.timelines.end(request.timeline, error=error, cancelled=cancelled)
        self._attainment.ended(request, error, self._clock())

    def context_for(self, traceparent: str) -> str:
        return self._spans.context_for(traceparent)

    def heartbeat(self, gateway: str, incarnation: int, requests: Iterable[ActiveRequest]) -> GatewayState:
        """This gateway's heartbeat, from running and recently ended requests."""
        now = self._clock()
        state = self._attainment.state(gateway, incarnation, requests, now)
        return msgspec.structs.replace(state, kept_traces=self._spans.kept(now))


class Background:
    """Keeps tasks until they end, and logs those that fail."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def see_to(self, work: Awaitable[Any]) -> None:
        """A task for what is not done already."""
        if not isinstance(work, Ready):
            self.spawn(_awaited(work))

    async def settle(self, timeout_s: float) -> None:
        """Wait until the current tasks have ended, up to a time limit."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("request.task_failed", exc_info=task.exception())


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """The records of what happens, and the clock that they are dated by."""

    records: Records
    counters: Counter[Event]
    background: Background
    clock: Callable[[], float]


async def _awaited(work: Awaitable[Any]) -> None:
    await work
