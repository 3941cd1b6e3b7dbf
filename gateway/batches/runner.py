"""Running lines, a limited number at a time, as requests of the lowest tier.

A line is done when its result is kept. A refused line (no room, budget or worker) comes again while its batch lives. A failure is
a result after `MAX_TRIES`. NATS counts the starts of a line, so the count outlives a gateway that dies of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from common import subjects
from common.errors import (
    InvalidRequestError,
    OverloadedError,
    QuarantinedError,
    ServingError,
    UnavailableError,
)
from common.tasks import cancel_all
from common.tracing import NoTracer, Tracer, in_trace
from gateway.answers.start import Answers
from gateway.batches.lines import WrongLineError, answered, model_of, parse_line, request_id
from gateway.batches.metrics import BatchMetrics
from gateway.batches.pooled import OPERATION, PooledLines
from gateway.batches.records import Line, Result, encode, line_decoder, result_decoder
from gateway.batches.store import BatchStore
from gateway.dialects.table import Entry
from gateway.http.body import BodyLimits, checked
from gateway.http.exchange import RequestTrace
from gateway.http.problem import NotKeptError, error_object, problem_of
from gateway.keeping.streams import Delivery, TooLargeError
from gateway.observe.spans import describe_answer, line_span
from gateway.request.spec import Origin
from gateway.tenants.shares import Asker
from gateway.tenants.tenants import Tenant, Tenants

log = logging.getLogger("baton.batches")

MAX_TRIES = 3  # tries of a failing line
MAX_GATEWAY_DEATHS = 4  # a line that killed this many gateways is given up
RETRY_S = 0.5
KEEP_RETRY_S = 0.5
WATCH_S = 1.0
MAX_DELAY_S = 60.0
NOT_READY_CHECK_S = 0.5
OTHER_MODEL_RETRY_S = 2.0  # delay before another gateway's line is offered again
STATUS_FOR_S = 1.0  # cache time of a batch's status
MAX_KNOWN_BATCHES = 1_000
MAX_ENTRY_BYTES = 4 << 20
LOWEST_PRIORITY = -1


@dataclass(frozen=True, slots=True)
class Asked:
    """A line with its text from the file."""

    line: Line
    custom_id: str
    body: bytes
    model: str


class LaterError(Exception):
    """The line could not be run now."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(f"again in {delay_s:g} s")
        self.delay_s = delay_s


class LineRunner:
    """Runs this gateway's share of the lines. `entries`: endpoints by path."""

    def __init__(
        self,
        store: BatchStore,
        answers: Answers,
        entries: Mapping[str, Entry],
        tenants: Tenants,
        metrics: BatchMetrics,
        *,
        pooled: PooledLines | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._store = store
        self._streams = store.streams
        self._answers = answers
        self._entries = entries
        self._pooled = pooled
        self._tenants = tenants
        self._metrics = metrics
        self._tracer = tracer or NoTracer()
        self._line_limits = BodyLimits(max_bytes=store.limits.line_bytes)
        self._tasks: dict[asyncio.Task[None], Line | None] = {}
        self._known: dict[str, tuple[float, bool]] = {}  # batch -> when it was read, and if it runs
        self._stopping = False

    @property
    def is_ready(self) -> bool:
        """True if a worker is ready for lines of some kind: those of models that generate, or that pool."""
        return self._answers.generations.ready or (self._pooled is not None and self._pooled.is_ready)

    async def run(self) -> None:
        most = self._store.limits.concurrency
        watch = asyncio.create_task(self._watch())
        try:
            await self._pull(most)
        finally:
            watch.cancel()

    async def _pull(self, most: int) -> None:
        while not self._stopping:
            if not self.is_ready:
                await asyncio.sleep(NOT_READY_CHECK_S)
            elif len(self._tasks) >= most:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            else:
                deliveries = await self._streams.fetch("line", most - len(self._tasks))
                if self._stopping:
                    return  # too late: `KeptStreams.close` releases them
                self._metrics.queued(deliveries[-1].num_waiting if deliveries else 0)
                for delivery in deliveries:
                    self._start(delivery)

    async def _watch(self) -> None:
        """Stop the lines of cancelled or expired batches."""
        while True:
            await asyncio.sleep(WATCH_S)
            for line in {line.batch: line for line in self._tasks.values() if line is not None}.values():
                with contextlib.suppress(ServingError):
                    if not await self._is_wanted(line):
                        self._cancel(line.batch)

    def _cancel(self, batch: str) -> None:
        for task, line in self._tasks.items():
            if line is not None and line.batch == batch:
                task.cancel()

    async def stop(self) -> None:
        """Stop taking lines, and release the running ones to other gateways."""
        self._stopping = True
        await cancel_all(self._tasks)

    def _start(self, delivery: Delivery) -> None:
        try:
            line = line_decoder.decode(delivery.data)
        except msgspec.MsgspecError as error:
            log.error("batches.malformed_line", extra={"error": str(error)[:200]})
            self._hold(asyncio.create_task(delivery.done()), None)
        else:
            self._hold(asyncio.create_task(self._take(delivery, line)), line)

    def _hold(self, task: asyncio.Task[None], line: Line | None) -> None:
        self._tasks[task] = line
        self._metrics.running(len(self._tasks))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._metrics.running(len(self._tasks))

    async def _take(self, delivery: Delivery, line: Line) -> None:
        try:
            if await self._is_wanted(line):
                await self._once(delivery, line)
            else:
                self._metrics.line("dropped")  # it already has a result, or its batch's error
            await delivery.done()
        except LaterError as later:
            self._metrics.line("again")
            await delivery.later(later.delay_s)
        except NotKeptError:
            await delivery.done()  # its file is gone: the batch ends it with an error
        except ServingError as error:  # NATS can't be reached
            log.warning("batches.line_not_kept", extra={"batch": line.batch, "error": error.message})
            await delivery.later(_delay(delivery.num_delivered, error))
        except asyncio.CancelledError:
            await delivery.later(0)
            raise
        except Exception:
            log.exception("batches.line_crashed", extra={"batch": line.batch, "line": line.line})
            await delivery.later(MAX_DELAY_S)

    async def _is_wanted(self, line: Line) -> bool:
        asked_at, wanted = self._known.get(line.batch, (0.0, False))
        if time.monotonic() - asked_at > STATUS_FOR_S:
            try:
                wanted = (await self._store.batch(line.tenant, line.batch)).status == "in_progress"
            except NotKeptError:
                wanted = False
            while len(self._known) >= MAX_KNOWN_BATCHES:
                del self._known[next(iter(self._known))]
            self._known[line.batch] = time.monotonic(), wanted
        return wanted

    async def _once(self, delivery: Delivery, line: Line) -> None:
        """Run a line and store its result, unless it has one. Raises LaterError and UnavailableError."""
        again, started = delivery.num_delivered > 1, 0
        # A repeated step may queue finished lines again.
        kept = await self._streams.get(subjects.batch_result(line.batch, line.line))
        if kept is not None:
            await self._mark(line, result_decoder.decode(kept.data))
            return
        asked = await self._asked(line)
        if again:
            started = await self._count_start(line)
        try:
            if started >= MAX_GATEWAY_DEATHS:
                result = self._failure(asked, QuarantinedError("given up: the gateways that ran this line ended"))
            else:
                result = await self._result(asked, delivery.num_delivered)
        except (LaterError, asyncio.CancelledError):
            if again:  # an orderly end: this start does not count
                with contextlib.suppress(ServingError):
                    await self._streams.put(subjects.batch_start(line.batch, line.line), b"%d" % (started - 1))
            raise
        if await self._keep(asked, result):
            self._metrics.line("failed" if result.failed else "completed", model=asked.model)
            await self._mark(line, result)

    async def _asked(self, line: Line) -> Asked:
        """Read a line. Raises NotKeptError without its file, LaterError for another gateway's model."""
        raw = await self._store.line(line.file, line.part, line.place)
        catalogue, pooled = self._answers.catalogue, self._pools(line)
        try:
            read = parse_line(raw, endpoint=line.endpoint, models=catalogue if pooled is None else pooled.names)
            model = model_of(read)
        except WrongLineError as error:  # it was checked when the batch was accepted
            log.warning("batches.line_of_another", extra={"batch": line.batch, "error": error.message})
            raise LaterError(OTHER_MODEL_RETRY_S) from error
        chosen = (
            catalogue.choose(model, Asker(line.batch, line.tenant))
            if pooled is None
            else catalogue.pooled_name(model) or model
        )
        return Asked(line, read.custom_id, bytes(read.body), chosen)

    def _pools(self, line: Line) -> PooledLines | None:
        """Answers a line that no dialect does; None: one does."""
        return None if line.endpoint in self._entries else self._pooled

    async def _keep(self, asked: Asked, result: Result) -> bool:
        """Store a result, however long NATS is down or full. False: the line has one, or its batch is over."""
        line = asked.line
        while True:
            try:
                return await self._streams.create(subjects.batch_result(line.batch, line.line), encode(result))
            except TooLargeError as error:
                result = self._failure(asked, error)
                continue
            except (UnavailableError, OverloadedError) as error:
                log.warning("batches.result_not_kept", extra={"batch": line.batch, "error": error.message})
            await asyncio.sleep(KEEP_RETRY_S)
            with contextlib.suppress(UnavailableError):
                if not await self._is_wanted(line):
                    return False

    async def _mark(self, line: Line, result: Result) -> None:
        if result.failed:
            await self._streams.create(subjects.batch_failure(line.batch, line.line), b"")

    async def _count_start(self, line: Line) -> int:
        """Number of starts of a line without an end, this one included."""
        subject = subjects.batch_start(line.batch, line.line)
        before = await self._streams.get(subject)
        started = int(before.data) + 1 if before is not None else 1
        await self._streams.put(subject, b"%d" % started)
        return started

    async def _result(self, asked: Asked, num_delivered: int) -> Result:
        """Run a line, with retries. Raises LaterError if it is refused."""
        line, tenant = asked.line, self._tenants.named(asked.line.tenant)
        if tenant is None:
            return self._failure(asked, InvalidRequestError("this line's API key is not known any more"))
        error: ServingError = UnavailableError("not tried")
        for number in range(MAX_TRIES):
            if number:
                await asyncio.sleep(RETRY_S * 2**number)
            try:
                return await self._answered(asked, tenant)
            except (InvalidRequestError, QuarantinedError) as final:
                return self._failure(asked, final)
            except (OverloadedError, UnavailableError) as refusal:
                raise LaterError(_delay(num_delivered, refusal)) from refusal
            except ServingError as failure:
                error = failure
            except Exception:
                log.exception("batches.line_crashed", extra={"batch": line.batch, "line": line.line})
                error = ServingError("internal error")
            log.warning("batches.line_failed", extra={"batch": line.batch, "line": line.line, "error": error.message})
        return self._failure(asked, error)

    async def _answered(self, asked: Asked, tenant: Tenant) -> Result:
        """Raises ServingError."""
        line = asked.line
        entry = self._entries.get(line.endpoint)
        context = self._tracer.new_trace()
        is_recorded = self._tracer.wants(context)
        trace = RequestTrace(context if is_recorded else "", "", time.monotonic(), is_recorded=is_recorded)
        try:
            with in_trace(trace.context):
                body = await (self._whole if entry is not None else self._rows)(asked, tenant, trace)
            result = answered(line.batch, line.line, asked.custom_id, status=200, body=body)
            if len(result) > MAX_ENTRY_BYTES:
                raise InvalidRequestError(
                    f"the answer has {len(result)} bytes, more than {MAX_ENTRY_BYTES}: ask for less"
                )
            trace.status = 200
            return Result(entry=result)
        except ServingError as error:
            trace.status, trace.error = problem_of(error).status, error.code
            raise
        finally:
            if is_recorded:
                operation = entry.endpoint.operation if entry is not None else OPERATION
                span = line_span(
                    trace, url=line.endpoint, operation=operation, batch=line.batch, custom_id=asked.custom_id
                )
                self._tracer.record(span)

    async def _rows(self, asked: Asked, tenant: Tenant, trace: RequestTrace) -> Any:
        """Raises ServingError."""
        line = asked.line
        if self._pooled is None or line.endpoint not in self._pooled.endpoints:
            raise LaterError(OTHER_MODEL_RETRY_S)
        return await self._pooled.answer(
            line.endpoint,
            asked.body,
            tenant=of_batches(tenant),
            priority=LOWEST_PRIORITY,
            request_id=request_id(line.batch, line.line),
            trace=trace,
            limits=self._line_limits,
        )

    async def _whole(self, asked: Asked, tenant: Tenant, trace: RequestTrace) -> Any:
        """Raises ServingError."""
        entry = self._entries[asked.line.endpoint]
        endpoint = entry.endpoint
        origin = Origin(of_batches(tenant), trace.context, trace.began_at)
        # Checked before tokenising.
        self._answers.generations.turn_away(origin.tenant, priority=LOWEST_PRIORITY, model=asked.model)
        body, ask = await checked(asked.body, entry.read, self._line_limits)
        served = self._answers.find(ask.model, asked.model)
        if ask.stream:
            raise InvalidRequestError("stream: a line of a batch can't be streamed", param="stream")
        priority = min(ask.terms.priority, LOWEST_PRIORITY, tenant.max_priority)
        ask = replace(ask, terms=replace(ask.terms, priority=priority))
        trace.attributes |= endpoint.describe(body)
        answer = await self._answers.start(ask, origin, served)
        trace.answered = partial(describe_answer, answer)
        try:
            whole = await endpoint.whole(body, answer)
            self._metrics.tokens(answer)
            return whole
        finally:
            answer.cancel("the line was given back")

    def _failure(self, asked: Asked, error: ServingError) -> Result:
        """The entry of a line that failed with an HTTP status, in its dialect's form."""
        line = asked.line
        entry, problem = self._entries.get(line.endpoint), problem_of(error)
        status, body = problem.status, error_object(problem)
        if entry is not None:
            status, body = entry.dialect.error(problem, request_id(line.batch, line.line))
        return Result(entry=answered(line.batch, line.line, asked.custom_id, status=status, body=body), failed=True)


def of_batches(tenant: Tenant) -> Tenant:
    """The tenant of a batch's lines: separate budgets from its clients', and no limit of concurrent requests."""
    limits = replace(tenant.limits, max_concurrent=0) if tenant.limits.max_concurrent else tenant.limits
    return replace(tenant, name=f"{tenant.name}:batch", limits=limits)


def _delay(num_delivered: int, error: ServingError) -> float:
    """Seconds until the next try: exponential, at least the requested delay, with jitter."""
    asked_s: float = getattr(error, "retry_after_s", 0.0)
    grown_s = RETRY_S * 2.0 ** min(num_delivered - 1, 10)
    return min(MAX_DELAY_S, max(asked_s, grown_s)) * (0.75 + 0.5 * random.random())
