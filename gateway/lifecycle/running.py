"""The requests in flight: what was heard of their workers, suspects that may have killed one, and records of their ends.

All requests that a worker computed when it died are suspects, and move at once. Their next workers take one suspect at a time
into a pass, and name it first (`worker.device.trials`). If such a worker dies, too, the request that it named last is given up. A
suspect that gets further than where its worker died is cleared.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from common.errors import InvalidRequestError, ServingError
from common.messages import GatewayState
from common.peers import Incarnation, Peers
from common.tasks import Ready
from gateway.lifecycle.pulse import Pulse
from gateway.observe.attainment import Attainment, ServiceLevels
from gateway.observe.spans import RequestSpans
from gateway.request.active import ActiveRequest
from gateway.request.state import Phase, RequestState
from gateway.request.timeline import Timelines

log = logging.getLogger("baton.requests")

# If the worker had more requests, only those with few tokens from it are suspects: trials take turns.
FEW_REQUESTS = 16
PROVEN_TOKENS = 8
MAX_UNNAMED_DEATHS = 3  # workers of an older release name no suspect
MAX_NAMED = 1_000
MAX_DEAD = 64  # recent deaths that may turn out to be none


@dataclass(frozen=True, slots=True)
class Death:
    """A worker died with a request and `others` besides. Mere silence convicts nobody."""

    worker: Incarnation
    others: int
    is_certain: bool = True


class Suspects:
    """Counts the deaths of workers that computed a request."""

    def __init__(self) -> None:
        self._named: dict[Incarnation, tuple[str, int]] = {}  # worker -> the request on trial, and its tokens before
        self._dead: dict[Incarnation, list[RequestState]] = {}  # worker -> requests charged with its death

    def trying(self, worker: Incarnation, request_id: str, position: int) -> None:
        """Note that the next pass computes a request behind `position` generated tokens (-1: unknown)."""
        self._named.pop(worker, None)
        self._named[worker] = request_id, position
        while len(self._named) > MAX_NAMED:
            del self._named[next(iter(self._named))]

    def last_named(self, worker: str) -> int:
        """The incarnation of the worker that named a suspect last; 0: none did."""
        return next((one for name, one in reversed(self._named) if name == worker), 0)

    def is_tried_by(self, worker: str, state: RequestState) -> bool:
        """True if the worker is still trying the request: better wait for the outcome."""
        return any(name == worker and tried == state.spec.request_id for (name, _), (tried, _) in self._named.items())

    def convict(self, state: RequestState, death: Death) -> bool:
        """Judge the death of a worker of `state`, certain or not. Returns True if `state` is to blame."""
        named, _ = self._named.get(death.worker, (None, 0))
        if named not in (None, state.spec.request_id):
            return False
        is_new_there = state.next_position - state.began_with < PROVEN_TOKENS
        is_suspect = state.is_suspect or state.deaths > 0 or death.others < FEW_REQUESTS or is_new_there
        state.suspect()
        state.is_suspect = is_suspect
        if not death.is_certain:
            return False
        state.deaths += 1
        self._dead.setdefault(death.worker, []).append(state)
        while len(self._dead) > MAX_DEAD:
            del self._dead[next(iter(self._dead))]
        return state.deaths >= (2 if named is not None else MAX_UNNAMED_DEATHS)

    def returned(self, worker: Incarnation) -> None:
        """Clear a worker that was thought dead and is heard again: it was cut off, not killed."""
        for state in self._dead.pop(worker, ()):
            state.deaths = max(0, state.deaths - 1)

    @property
    def are_tried(self) -> bool:
        """True if any worker named a suspect and has sent no tokens of it since."""
        return bool(self._named)

    def heard(self, state: RequestState, sender: Incarnation | None = None) -> None:
        """Clear the request: it got tokens from `sender`, or ended.

        A trial is survived by a token of its own pass: that of the pass before may come after the next one is named.
        """
        request_id = state.spec.request_id
        if sender is not None:
            named, position = self._named.get(sender, ("", 0))
            if named == request_id and (state.is_over or state.next_position > position):
                del self._named[sender]
        if state.deaths == 1 and state.is_over:
            self._named = {worker: named for worker, named in self._named.items() if named[0] != request_id}
        if (state.deaths or state.is_suspect) and (state.is_over or state.next_position >= state.clear_at):
            state.deaths, state.harmed, state.is_suspect = 0, 0, False


class Running:
    """Every request between its admission and its end, and the only list of them."""

    def __init__(self) -> None:
        self._requests: dict[str, ActiveRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Iterate over a copy: requests may end meanwhile."""
        return iter(list(self._requests.values()))

    def find(self, request_id: str) -> ActiveRequest | None:
        """The request, or None if it is over or unknown."""
        return self._requests.get(request_id)

    def add(self, request: ActiveRequest) -> None:
        """Raises InvalidRequestError if its id is in use."""
        request_id = request.state.spec.request_id
        self.refuse_twin(request_id)
        self._requests[request_id] = request

    def remove(self, request: ActiveRequest) -> bool:
        """True only for the first end."""
        request_id = request.state.spec.request_id
        if self._requests.get(request_id) is not request:
            return False
        del self._requests[request_id]
        return True

    def refuse_twin(self, request_id: str) -> None:
        """Raise InvalidRequestError if this id is in flight."""
        if request_id in self._requests:
            raise InvalidRequestError(f"request {request_id} is running already", param="request_id")

    @property
    def states(self) -> list[RequestState]:
        """The state of each request."""
        return [request.state for request in self._requests.values()]

    def num_with(self, worker: str) -> int:
        """Number of requests that this worker computes now."""
        return sum(state.is_with(worker) for state in self.states)

    def needed_workers(self) -> dict[str, bool]:
        """The workers that requests need now, and whether any of the requests is decoding."""
        needed: dict[str, bool] = {}
        for request in self._requests.values():
            if not request.retrying:
                for worker in request.state.needs:
                    needed[worker] = needed.get(worker, False) or request.state.phase is Phase.DECODING
        return needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The state that messages from workers change."""

    running: Running
    pulse: Pulse
    suspects: Suspects
    peers: Peers


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
