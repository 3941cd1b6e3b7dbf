"""Running lines: a bounded number at a time, each as a request of the lowest tier through the gateway's own path.

A line is done when its result is kept. A refusal (no room, no budget, no worker) is no result: the line comes again later, for as
long as its batch lives. A failure is, after `TRIES`. A line whose gateways die is counted where that outlives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from common import subjects
from common.errors import (
    InvalidRequestError,
    OverloadedError,
    QuarantinedError,
    ServingError,
    UnavailableError,
)
from common.lifecycle import cancel_all
from common.tracing import NoTracer, Tracer, in_trace
from gateway.batches.lines import WrongLineError, answered, parse_line, refused
from gateway.batches.metrics import BatchMetrics
from gateway.batches.records import Line, Result, encode, line_decoder, result_decoder
from gateway.batches.store import BatchStore
from gateway.batches.streams import Delivery, TooLargeError
from gateway.dialect import Answer, Dialect, Origin
from gateway.responses import NotKeptError, error_code, error_status
from gateway.schema import ChatRequest, CompletionRequest, parse_body
from gateway.spans import RequestTrace, line_span, new_trace
from gateway.tenants import Tenant, Tenants

log = logging.getLogger("baton.batches")

Body = TypeVar("Body", ChatRequest, CompletionRequest)

TRIES = 3  # of a line that fails
DEATHS = 4  # of gateways that ran a line: then it is given up
RETRY_S = 0.5
KEEP_RETRY_S = 0.5
WATCH_S = 1.0
LONGEST_DELAY_S = 60.0
NOT_READY_S = 0.5
ANOTHER_S = 2.0  # until a line is offered again that another gateway has to run
STATUS_FOR_S = 1.0  # a batch's status is asked for again after this
MAX_KNOWN = 1_000  # batches whose status is remembered
MAX_ENTRY_BYTES = 4 << 20
LOWEST_PRIORITY = -1


@dataclass(frozen=True, slots=True)
class Asked:
    """A line with what its file says."""

    line: Line
    custom_id: str
    body: bytes


class LaterError(Exception):
    """The line could not be run now."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(f"again in {delay_s:g} s")
        self.delay_s = delay_s


class LineRunner:
    """Takes this gateway's share of the lines."""

    def __init__(
        self,
        store: BatchStore,
        dialect: Dialect,
        tenants: Tenants,
        metrics: BatchMetrics,
        *,
        tracer: Tracer | None = None,
        trace_share: float = 1.0,
    ) -> None:
        self._store = store
        self._streams = store.streams
        self._dialect = dialect
        self._tenants = tenants
        self._metrics = metrics
        self._tracer = tracer or NoTracer()
        self._trace_share = trace_share
        self._tasks: dict[asyncio.Task[None], Line | None] = {}
        self._known: dict[str, tuple[float, bool]] = {}  # batch -> when it was asked, whether it runs
        self._stopping = False

    async def run(self) -> None:
        """Take lines until `stop`."""
        most = self._store.limits.concurrency
        watch = asyncio.create_task(self._watch())
        try:
            await self._pull(most)
        finally:
            watch.cancel()

    async def _pull(self, most: int) -> None:
        while not self._stopping:
            if not self._dialect.generations.ready:
                await asyncio.sleep(NOT_READY_S)
            elif len(self._tasks) >= most:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            else:
                deliveries = await self._streams.fetch("line", most - len(self._tasks))
                if self._stopping:
                    return  # they came too late: `BatchStreams.close` gives them back
                self._metrics.queued(deliveries[-1].num_waiting if deliveries else 0)
                for delivery in deliveries:
                    self._start(delivery)

    async def _watch(self) -> None:
        """Stop the lines of batches that were cancelled or expired."""
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
        """Take no more, and give back what runs: other gateways do it."""
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
        """One delivery of a line: its result kept, or given back."""
        try:
            if await self._is_wanted(line):
                await self._once(delivery, line)
            else:
                self._metrics.line("dropped")  # its batch gave it an error, or has a result
            await delivery.done()
        except LaterError as later:
            self._metrics.line("again")
            await delivery.later(later.delay_s)
        except NotKeptError:
            await delivery.done()  # its file is gone: the batch ends with an error for it
        except ServingError as error:  # NATS is away
            log.warning("batches.line_not_kept", extra={"batch": line.batch, "error": error.message})
            await delivery.later(_delay(delivery.num_delivered, error))
        except asyncio.CancelledError:
            await delivery.later(0)
            raise
        except Exception:
            log.exception("batches.line_crashed", extra={"batch": line.batch, "line": line.line})
            await delivery.later(LONGEST_DELAY_S)

    async def _is_wanted(self, line: Line) -> bool:
        asked_at, wanted = self._known.get(line.batch, (0.0, False))
        if time.monotonic() - asked_at > STATUS_FOR_S:
            try:
                wanted = (await self._store.batch(line.tenant, line.batch)).status == "in_progress"
            except NotKeptError:
                wanted = False
            while len(self._known) >= MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[line.batch] = time.monotonic(), wanted
        return wanted

    async def _once(self, delivery: Delivery, line: Line) -> None:
        """Run a line and keep its result, unless it has one. Raises LaterError and UnavailableError."""
        again, started = delivery.num_delivered > 1, 0
        # also new work may be old: a part of a file that is queued once more, by a step that was done twice
        kept = await self._streams.get(subjects.batch_result(line.batch, line.line))
        if kept is not None:
            await self._mark(line, result_decoder.decode(kept.data))
            return
        asked = await self._asked(line)
        if again:
            started = await self._count_start(line)
        try:
            if started >= DEATHS:
                result = _failure(asked, QuarantinedError("given up: the gateways that ran this line ended"))
            else:
                result = await self._result(asked, delivery.num_delivered)
        except (LaterError, asyncio.CancelledError):
            if again:  # it came to an orderly end: that start does not count
                with contextlib.suppress(ServingError):
                    await self._streams.put(subjects.batch_start(line.batch, line.line), b"%d" % (started - 1))
            raise
        if await self._keep(asked, result):
            self._metrics.line("failed" if result.failed else "completed")
            await self._mark(line, result)

    async def _asked(self, line: Line) -> Asked:
        """Raises NotKeptError when the file is gone: then its batch ends; LaterError for a line of another gateway's model."""
        raw = await self._store.line(line.file, line.part, line.place)
        try:
            read = parse_line(raw, endpoint=line.endpoint, model=self._dialect.served_model)
        except WrongLineError as error:  # whoever took the batch on found the line right
            log.warning("batches.line_of_another", extra={"batch": line.batch, "error": error.message})
            raise LaterError(ANOTHER_S) from error
        return Asked(line, read.custom_id, bytes(read.body))

    async def _keep(self, asked: Asked, result: Result) -> bool:
        """Keep a result, however long NATS is away or full: it is not computed again. False: there is one, or nobody wants it."""
        line = asked.line
        while True:
            try:
                return await self._streams.create(subjects.batch_result(line.batch, line.line), encode(result))
            except TooLargeError as error:
                result = _failure(asked, error)
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
        """How often a line was begun, this time included, without an end."""
        subject = subjects.batch_start(line.batch, line.line)
        before = await self._streams.get(subject)
        started = int(before.data) + 1 if before is not None else 1
        await self._streams.put(subject, b"%d" % started)
        return started

    async def _result(self, asked: Asked, num_delivered: int) -> Result:
        """Run a line, again where it fails. Raises LaterError where it is refused."""
        line, tenant = asked.line, self._tenants.named(asked.line.tenant)
        if tenant is None:
            return _failure(asked, InvalidRequestError("this line's API key is not known any more"))
        error: ServingError = UnavailableError("not tried")
        for number in range(TRIES):
            if number:
                await asyncio.sleep(RETRY_S * 2**number)
            try:
                return await self._answered(asked, tenant)
            except (InvalidRequestError, QuarantinedError) as final:
                return _failure(asked, final)
            except (OverloadedError, UnavailableError) as refusal:
                raise LaterError(_delay(num_delivered, refusal)) from refusal
            except ServingError as failure:
                error = failure
            except Exception:
                log.exception("batches.line_crashed", extra={"batch": line.batch, "line": line.line})
                error = ServingError("internal error")
            log.warning("batches.line_failed", extra={"batch": line.batch, "line": line.line, "error": error.message})
        return _failure(asked, error)

    async def _answered(self, asked: Asked, tenant: Tenant) -> Result:
        """One request. Raises ServingError."""
        line = asked.line
        context = new_trace(self._trace_share)
        trace = RequestTrace(context if self._tracer.wants(context) else "", "", time.monotonic())
        try:
            with in_trace(trace.context):
                body = await self._request(asked, tenant, trace)
            entry = answered(line.batch, line.line, asked.custom_id, status=200, body=body)
            if len(entry) > MAX_ENTRY_BYTES:
                raise InvalidRequestError(
                    f"the answer has {len(entry)} bytes, more than {MAX_ENTRY_BYTES}: ask for less"
                )
            trace.status = 200
            return Result(entry=entry)
        except ServingError as error:
            trace.status, trace.error = error_status(error)[0], error_code(error)
            raise
        finally:
            if trace.context:
                self._tracer.record(line_span(trace, url=line.endpoint, batch=line.batch, custom_id=asked.custom_id))

    async def _request(self, asked: Asked, tenant: Tenant, trace: RequestTrace) -> dict[str, Any]:
        origin = Origin(of_batches(tenant), trace.context, trace.began_at)
        self._dialect.generations.turn_away(origin.tenant, priority=LOWEST_PRIORITY)  # before the work of tokenising
        if asked.line.endpoint == "/v1/chat/completions":
            chat = self._checked(parse_body(asked.body, ChatRequest), tenant)
            return await self._whole(chat, await self._dialect.start_chat(chat, origin), trace)
        plain = self._checked(parse_body(asked.body, CompletionRequest), tenant)
        return await self._whole(plain, await self._dialect.start_completion(plain, origin), trace)

    def _checked(self, body: Body, tenant: Tenant) -> Body:
        self._dialect.check_model(body.model)
        if body.stream:
            raise InvalidRequestError("stream: a line of a batch can't be streamed", param="stream")
        body.priority = min(body.priority, LOWEST_PRIORITY, tenant.max_priority)
        return body

    async def _whole(
        self, body: ChatRequest | CompletionRequest, answer: Answer, trace: RequestTrace
    ) -> dict[str, Any]:
        trace.body, trace.answer = body, answer
        try:
            whole = await self._dialect.whole(body, answer, answer.pieces())
            self._metrics.tokens(answer)
            return whole
        finally:
            await answer.cancel("the line was given back")


def of_batches(tenant: Tenant) -> Tenant:
    """The tenant as lines see it: limits by the minute of their own, so that batches take none of what its clients may ask for,
    and no limit at a time but the gateway's.
    """
    limits = replace(tenant.limits, max_concurrent=0) if tenant.limits.max_concurrent else tenant.limits
    return replace(tenant, name=f"{tenant.name}:batch", limits=limits)


def _failure(asked: Asked, error: ServingError) -> Result:
    line = asked.line
    status, kind = error_status(error)
    entry = refused(
        line.batch,
        line.line,
        asked.custom_id,
        status=status,
        kind=kind,
        message=error.message,
        param=error.param,
        code=error_code(error),
    )
    return Result(entry=entry, failed=True)


def _delay(num_delivered: int, error: ServingError) -> float:
    """Until a line is tried again: longer each time, not shorter than was asked for, and not for all lines the same."""
    asked_s: float = getattr(error, "retry_after_s", 0.0)
    grown_s = RETRY_S * 2.0 ** min(num_delivered - 1, 10)
    return min(LONGEST_DELAY_S, max(asked_s, grown_s)) * (0.75 + 0.5 * random.random())
