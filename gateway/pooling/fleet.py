"""Workers that pool, as one gateway asks them: by what it waits for from each, in pieces, again where one is lost.

No request needs what a worker keeps, so another one may always be asked. A piece that nobody waits for is cancelled there.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from common import subjects
from common.bus import Bus
from common.errors import (
    DeadlineExceededError,
    OverloadedError,
    ServingError,
    StepFailedError,
    UnavailableError,
    error_from_code,
)
from common.messages import Ack, Cancel, Pool, Pooled, WorkerState, pooled_decoder
from common.peers import Peers
from common.tracing import Attributes, NoTracer, Tracer, child_of
from gateway.http.exchange import RequestTrace
from gateway.request.attempt import AttemptLine
from gateway.request.timeline import Timeline
from gateway.tenants.tenants import Tenant

MAX_ATTEMPTS = 3
ANSWER_S = 50.0  # NATS lets a worker answer for a minute
WINDOW_TOKENS = 1 << 16  # at one worker, from one gateway
# A worker hears 256 messages at a time, and one that cancels must not wait behind the others.
WINDOW_PIECES = 192
PLACED = "room"  # the placement's reason: the worker that is asked least had room
MAX_WAITING_TOKENS = 1 << 22
PIECE_TOKENS, PIECE_INPUTS, PIECE_BYTES = 1 << 14, 1024, 1 << 19
MAX_ANSWER_BYTES = 7 << 20  # NATS carries 8 MB at a time
SMALLEST_PIECE_TOKENS = 1 << 11  # a piece for each worker pays from here on

_INPUT, _CACHED = "gen_ai.usage.input_tokens", "gen_ai.usage.cache_read.input_tokens"

Ready = Callable[[], Iterable[WorkerState]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The asker's tenant, with its share of the workers, the priority, and the deadline."""

    tenant: Tenant
    until: float  # `time.monotonic()`
    priority: int = 0
    line: Timeline | None = None  # gets each attempt at a piece


@dataclass(slots=True, order=True)
class _Ticket:
    order: tuple[int, float, int]
    begins: float = 0.0
    tokens: int = 0
    tried: Sequence[str] = ()
    may: asyncio.Future[str] | None = None


class PoolingFleet:
    """The workers of one model. Every call is of the event loop's thread."""

    max_answer_bytes = MAX_ANSWER_BYTES

    def __init__(self, bus: Bus, peers: Peers, ready: Ready, *, gateway_id: str, tracer: Tracer | None = None) -> None:
        self._bus, self._ready, self._gateway_id = bus, ready, gateway_id
        self._tracer = tracer or NoTracer()
        self._asked = Counter[str]()  # tokens by worker, each given back by who asked
        self._pieces = Counter[str]()  # pieces by worker
        self._names = itertools.count(random.getrandbits(40))  # pieces' numbers, unlike another gateway's
        self._cancelling = set[asyncio.Task[None]]()
        self._running = defaultdict[str, set[asyncio.Future[Pooled | Ack]]](set)
        self._waiting = list[_Ticket]()
        self._waiting_tokens = 0
        self._tags = defaultdict[str, float](float)  # tokens over weight of each tenant that waits
        self._begun = 0.0  # the largest of those that began
        self._count = itertools.count()
        peers.on_lost(self._lost)
        peers.on_joined(lambda _: self._start())
        peers.on_changed(lambda _: self._start())

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_tokens

    @property
    def longest(self) -> int | None:
        """The most tokens of an input; None while no worker is ready."""
        return max((state.max_model_len for state in self._ready()), default=None)

    @property
    def num_ready(self) -> int:
        return sum(1 for _ in self._ready())

    def turn_away(self, tokens: int) -> None:
        """Raise OverloadedError if so many more would wait for too long."""
        if self._waiting_tokens and self._waiting_tokens + tokens > MAX_WAITING_TOKENS:
            rate = sum(state.prefill_tokens_per_s for state in self._ready())
            retry_s = self._waiting_tokens / rate if rate else 1.0
            raise OverloadedError(f"{self._waiting_tokens} tokens wait already", retry_after_s=min(retry_s, 60.0))

    async def ask(self, message: Pool, turn: Turn) -> Pooled:
        """The answer to a piece.

        Raises UnavailableError without a ready worker, DeadlineExceededError, and what the worker of the last attempt answers.
        """
        tokens, tried, because = sum(map(len, message.inputs)) // 4, list[str](), ""
        name = f"{message.request_id}-{next(self._names)}"
        while True:
            traceparent = message.traceparent or ""
            context = child_of(traceparent) if self._tracer.wants(traceparent) else traceparent
            line = AttemptLine(
                number=len(tried) + 1,
                began_at=time.monotonic(),
                because=because,
                prefill="",
                decode=[],
                reason=PLACED,
                prompt_tokens=tokens,
                traceparent=context,
            )
            if turn.line is not None:
                turn.line.began(line)
            outcome = "cancelled"
            try:
                worker = await self._place(tokens, turn, tried)
                line.prefill, line.published_at = worker, time.monotonic()
                try:
                    piece = msgspec.structs.replace(message, request_id=name, traceparent=context or UNSET)
                    reply = await self._attempt(worker, piece, turn.until)
                finally:
                    self._give_back(worker, tokens)
                _answered(line, reply)
                outcome = "ok"
                return reply
            except ServingError as error:
                outcome = because = f"{error.code}: {error.message}"
                if not line.prefill or not isinstance(error, UnavailableError | StepFailedError | OverloadedError):
                    raise
                tried.append(line.prefill)
                if len(tried) >= MAX_ATTEMPTS:
                    raise
            finally:
                line.ended_at, line.outcome = time.monotonic(), outcome

    def _take(self, worker: str, tokens: int) -> None:
        self._asked[worker] += tokens
        self._pieces[worker] += 1

    def _give_back(self, worker: str, tokens: int) -> None:
        self._asked[worker] -= tokens
        self._pieces[worker] -= 1
        if not self._pieces[worker]:
            del self._asked[worker], self._pieces[worker]
        self._start()

    async def _attempt(self, worker: str, message: Pool, until: float) -> Pooled:
        remaining_s = min(until - time.monotonic(), ANSWER_S)
        if remaining_s <= 0:
            raise DeadlineExceededError("the deadline passed before the texts were computed")
        asked = msgspec.structs.replace(message, remaining_ms=int(1000 * remaining_s))
        subject = subjects.order(worker, self._gateway_id)
        task = asyncio.ensure_future(self._bus.request(subject, asked, pooled_decoder, timeout_s=remaining_s + 1))
        self._running[worker].add(task)
        try:
            reply = await task
        except asyncio.CancelledError:
            self._cancel(worker, message)
            asking = asyncio.current_task()
            if asking is not None and asking.cancelling():
                raise
            raise UnavailableError(f"worker {worker} is gone") from None
        finally:
            self._running[worker].discard(task)
            if not self._running[worker]:
                del self._running[worker]
        if not isinstance(reply, Pooled):
            raise UnavailableError(f"worker {worker} does not pool")
        if reply.code:
            raise error_from_code(reply.code, reply.message)
        return reply

    def _cancel(self, worker: str, piece: Pool) -> None:
        """Tell a worker that nobody waits for a piece any more."""
        task = asyncio.create_task(self._tell(subjects.order(worker, self._gateway_id), piece))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _tell(self, subject: str, piece: Pool) -> None:
        message = Cancel(
            request_id=piece.request_id, attempt=1, gateway=self._gateway_id, traceparent=piece.traceparent
        )
        with contextlib.suppress(ServingError):  # then it is computed, and nobody reads it
            await self._bus.publish(subject, message)

    async def _place(self, tokens: int, turn: Turn, tried: Sequence[str]) -> str:
        """The worker for so many tokens, charged with them, once one has room. Raises UnavailableError, DeadlineExceededError."""
        worker = None if self._waiting else self._with_room(tokens, tried)
        if worker is not None:
            self._take(worker, tokens)
            return worker
        may: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        begins = max(self._tags[turn.tenant.name], self._begun)
        self._tags[turn.tenant.name] = ends = begins + tokens / max(turn.tenant.weight, 1e-6)
        heapq.heappush(self._waiting, _Ticket((-turn.priority, ends, next(self._count)), begins, tokens, tried, may))
        self._waiting_tokens += tokens
        is_taken = False
        try:
            async with asyncio.timeout(max(0.0, turn.until - time.monotonic())):
                worker = await may
            is_taken = True
            return worker
        except TimeoutError:
            if not any(self._ready()):
                raise UnavailableError("no worker of this model is ready") from None
            raise DeadlineExceededError("the deadline passed before a worker had room") from None
        finally:
            self._waiting_tokens -= tokens
            if not is_taken and not may.cancel() and not may.cancelled():  # a worker was chosen, and nobody will ask it
                self._give_back(may.result(), tokens)

    def _start(self) -> None:
        """Let those who wait begin, while workers have room."""
        while self._waiting:
            first = self._waiting[0]
            if first.may is None or first.may.done():
                heapq.heappop(self._waiting)
                continue
            worker = self._with_room(first.tokens, first.tried)
            if worker is None:
                return
            heapq.heappop(self._waiting)
            self._begun = max(self._begun, first.begins)
            self._take(worker, first.tokens)
            first.may.set_result(worker)
        self._tags.clear()
        self._begun = 0.0

    def _with_room(self, tokens: int, tried: Sequence[str]) -> str | None:
        """The worker that is asked least; one that failed only where there is no other."""
        names = [state.worker for state in self._ready()]
        names = [name for name in names if name not in tried] or names
        best = min(names, key=lambda name: self._asked[name], default=None)
        if best is None or (self._asked[best] and self._asked[best] + tokens > WINDOW_TOKENS):
            return None
        return best if self._pieces[best] < WINDOW_PIECES else None

    def _lost(self, worker: str, _: int) -> None:
        for task in self._running.get(worker, ()):
            task.cancel()


def _answered(line: AttemptLine, reply: Pooled) -> None:
    """Note an answer, and what the worker says of its time: it got the piece that long before."""
    now = time.monotonic()
    line.claimed_by, line.worker_queue_ms, line.prefill_ms = line.prefill, reply.queue_ms, reply.compute_ms
    line.claimed_at = max(line.published_at or now, now - (reply.queue_ms + reply.compute_ms) / 1000)
    line.first_token_at, line.cached_tokens = now, reply.cached_tokens


def pieces(counts: Sequence[int], *, workers: int, row_bytes: int, rows_a_token: bool) -> list[slice]:
    """Runs of inputs that are asked for at once: bounded in tokens, inputs and bytes of the answer, and one for each worker."""
    total = sum(counts)
    most = min(PIECE_TOKENS, max(SMALLEST_PIECE_TOKENS, -(-total // max(1, workers))))
    found, begin, tokens, size = list[slice](), 0, 0, 0
    for at, count in enumerate(counts):
        answer = row_bytes * (count if rows_a_token else 1)
        is_full = tokens + count > most or at - begin >= PIECE_INPUTS or size + answer > PIECE_BYTES
        if at > begin and is_full:
            found.append(slice(begin, at))
            begin, tokens, size = at, 0, 0
        tokens, size = tokens + count, size + answer
    return [*found, slice(begin, len(counts))]


def ended_well(line: Timeline) -> None:
    """Note the answer's instant, and the way to it of the piece that came last."""
    last = max(line.attempts, key=lambda attempt: attempt.first_token_at or 0.0, default=None)
    line.first_token_at = time.monotonic()
    line.cached_tokens = sum(attempt.cached_tokens or 0 for attempt in line.attempts)
    if last is not None and last.published_at is not None:
        waited_ms = 1000 * (last.published_at - line.submitted_at)
        line.phases |= {"queue": waited_ms + (last.worker_queue_ms or 0.0), "prefill": last.prefill_ms or 0.0}


def described(line: Timeline, trace: RequestTrace) -> Attributes:
    """Attributes of a request's span, its questions together."""
    if not trace.is_recorded:
        return {}
    known = trace.attributes
    workers = {attempt.claimed_by for attempt in line.attempts} - {""}
    before = known.get("baton.pool.workers", [])
    tokens, cached = (known.get(name, 0) for name in (_INPUT, _CACHED))
    return {
        "gen_ai.request.model": line.model,
        "gen_ai.response.model": line.model,
        _INPUT: line.prompt_tokens + (tokens if isinstance(tokens, int) else 0),
        _CACHED: line.cached_tokens + (cached if isinstance(cached, int) else 0),
        "baton.pool.workers": sorted(workers | set(before if isinstance(before, list) else [])),
    }
