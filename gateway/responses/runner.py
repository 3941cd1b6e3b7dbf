"""Running background responses, a limited number at a time, on whichever gateway takes them.

A response is done when it is kept that it is over. One that is refused (no room, budget or worker) comes again, up to its time.
One whose gateway died is made anew elsewhere, unless its stream had begun: then it has failed, since no other answer would go on
where that one stopped. How often a response was begun is kept with it, so one that gateways die of is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from functools import partial

import msgspec

from common.errors import OverloadedError, ServingError, UnavailableError
from common.tasks import cancel_all
from common.tracing import NoTracer, Tracer, in_trace
from gateway.answers.answer import Answer
from gateway.answers.start import Answers
from gateway.dialects.responses.events import ResponseEvents
from gateway.dialects.responses.objects import error_of
from gateway.dialects.responses.schema import ResponseRequest
from gateway.dialects.table import Entry
from gateway.http.exchange import RequestTrace
from gateway.http.problem import INTERNAL, NotKeptError, Problem, problem_of
from gateway.keeping.streams import Delivery
from gateway.observe.metrics import AnswerMetrics, GatewayMetrics
from gateway.observe.spans import background_span, describe_answer
from gateway.request.spec import Origin
from gateway.responses.background import KeptStream, SupersededError, insisting
from gateway.responses.memory import Memory
from gateway.responses.metrics import KeptMetrics
from gateway.responses.records import Content, Json, ResponseRecord, Run, run_decoder
from gateway.responses.store import ResponseStore, off_loop
from gateway.tenants.shares import Asker
from gateway.tenants.tenants import Tenant, Tenants

log = logging.getLogger("baton.responses")

MAX_STARTS = 3
WATCH_S = 1.0
FLUSH_S = 0.1
RETRY_S = 0.5
MAX_DELAY_S = 30.0
ORPHAN_AFTER_S = 60.0  # work without a response is dropped after this
NOT_READY_CHECK_S = 0.5
STREAM_BEGAN = "the gateway that made this response ended when its stream had begun: ask again"
GIVEN_UP = "given up: the gateways that made this response ended"
TOO_LATE = "there was no room for this response in time: ask again later"
NO_KEY = "the API key that asked for this response is not known any more"
_encode = msgspec.json.Encoder().encode


class LaterError(Exception):
    """The response could not be run now."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(error.message)
        self.asked_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0


class Runner:
    """Runs this gateway's share of the background responses."""

    def __init__(
        self,
        store: ResponseStore,
        memory: Memory,
        answers: Answers,
        entry: Entry,
        tenants: Tenants,
        metrics: KeptMetrics,
        gateway_metrics: GatewayMetrics,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        self._store = store
        self._memory = memory
        self._answers = answers
        self._entry = entry
        self._tenants = tenants
        self._metrics = metrics
        self._gateway_metrics = gateway_metrics
        self._tracer = tracer or NoTracer()
        self._running: dict[str, tuple[asyncio.Task[None], str]] = {}  # response -> its task, its tenant
        self._leaving = False

    async def run(self) -> None:
        """Take responses until told to leave."""
        watch = asyncio.create_task(self._watch())
        most = self._store.limits.concurrency
        try:
            while not self._leaving:
                if not self._answers.generations.ready:
                    await asyncio.sleep(NOT_READY_CHECK_S)
                elif len(self._running) >= most:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                else:
                    deliveries = await self._store.streams.fetch("run", most - len(self._running))
                    if self._leaving:
                        return  # too late: `KeptStreams.close` releases them
                    for delivery in deliveries:
                        await self._start(delivery)
        finally:
            watch.cancel()

    def leave(self) -> None:
        """Take no more."""
        self._leaving = True

    async def stop(self) -> None:
        """Stop, and release running responses to other gateways."""
        self._leaving = True
        await cancel_all(self._tasks)

    @property
    def _tasks(self) -> set[asyncio.Task[None]]:
        return {task for task, _ in self._running.values()}

    def cancelled(self, response_id: str) -> None:
        """Cancel a response that is no longer wanted."""
        if response_id in self._running:
            self._running[response_id][0].cancel()

    async def _watch(self) -> None:
        """Stop responses that were cancelled or deleted through another gateway."""
        while True:
            await asyncio.sleep(WATCH_S)
            for response_id, (_, tenant) in list(self._running.items()):
                try:
                    if (await self._store.record(tenant, response_id)).is_over:
                        self.cancelled(response_id)
                except NotKeptError:
                    self.cancelled(response_id)
                except ServingError:
                    break  # NATS is down

    async def _start(self, delivery: Delivery) -> None:
        try:
            run = run_decoder.decode(delivery.data)
        except msgspec.MsgspecError as error:
            log.error("responses.malformed_run", extra={"error": str(error)[:200]})
            await delivery.done()
            return
        if run.response in self._running:  # it was thought to be lost
            await delivery.later(MAX_DELAY_S)
            return
        task = asyncio.create_task(self._take(delivery, run))
        self._running[run.response] = task, run.tenant
        self._metrics.running(len(self._running))
        task.add_done_callback(lambda _: self._ended(run.response))

    def _ended(self, response_id: str) -> None:
        del self._running[response_id]
        self._metrics.running(len(self._running))

    async def _take(self, delivery: Delivery, run: Run) -> None:
        try:
            status = await self._once(run)
            if status:
                self._metrics.background(status)
            await delivery.done()
        except LaterError as later:
            self._metrics.background("again")
            await delivery.later(_delay(delivery.num_delivered, later.asked_s))
        except SupersededError:
            await delivery.done()
        except NotKeptError:
            if time.time() - run.created_at < ORPHAN_AFTER_S:
                await delivery.later(RETRY_S)  # it is still being written
            else:
                await delivery.done()
        except ServingError as error:  # NATS can't be reached
            log.warning("responses.not_ended", extra={"response": run.response, "error": error.message})
            await delivery.later(_delay(delivery.num_delivered, 0.0))
        except asyncio.CancelledError:
            await delivery.later(0)  # redelivered, and then found to be over, or running elsewhere
            raise
        except Exception:
            log.exception("responses.crashed", extra={"response": run.response})
            await delivery.later(MAX_DELAY_S)

    async def _once(self, run: Run) -> str:
        """Run a response; return its final status, "" if it was over. Raises as `_take` expects."""
        before = await self._store.record(run.tenant, run.response)
        if before.is_over:
            return ""
        content = await self._store.content(before)
        tenant = self._tenants.named(run.tenant)
        why = await self._hopeless(before)
        record = await self._change(before, partial(_begun, starts=before.starts + 1))
        if why or tenant is None:
            return await self._failed(record, content, Problem(status=500, message=why or NO_KEY))
        try:
            return await self._made(record, content, tenant)
        except (LaterError, asyncio.CancelledError):  # an orderly end: this start does not count
            await asyncio.create_task(self._give_back(record))  # calls to streams would heed this task's cancellation
            raise

    async def _give_back(self, record: ResponseRecord) -> None:
        with contextlib.suppress(ServingError):
            await self._store.change(record.tenant, record.id, partial(_given_back, starts=record.starts))

    async def _change(self, before: ResponseRecord, to: Callable[[ResponseRecord], ResponseRecord]) -> ResponseRecord:
        """Change a record that nobody else changed meanwhile. Raises SupersededError."""

        def changed(now: ResponseRecord) -> ResponseRecord:
            return to(now) if now == before else now

        after = await self._store.change(before.tenant, before.id, changed)
        if after != to(before):
            raise SupersededError
        return after

    async def _hopeless(self, record: ResponseRecord) -> str:
        """Return why a response can't be run any more; "" if it can."""
        if record.status == "in_progress" and record.keeps_events and await self._store.has_events(record, 1):
            return STREAM_BEGAN
        if record.starts >= MAX_STARTS:
            return GIVEN_UP
        if time.time() - record.created_at > self._store.limits.wait_s:
            return TOO_LATE
        return ""

    async def _made(self, record: ResponseRecord, content: Content, tenant: Tenant) -> str:
        """Run the response. Raises LaterError if it is refused."""
        context = self._tracer.new_trace()
        is_recorded = self._tracer.wants(context)
        trace = RequestTrace(context if is_recorded else "", "", time.monotonic(), is_recorded=is_recorded)
        try:
            with in_trace(trace.context):
                try:
                    body, answer = await self._answer(record, content, tenant, trace)
                except (OverloadedError, UnavailableError) as refusal:
                    raise LaterError(refusal) from refusal
                except ServingError as error:
                    trace.status, trace.error = problem_of(error).status, error.code
                    return await self._failed(record, content, problem_of(error))
                try:
                    status = await self._told(record, content, body, answer, trace)
                finally:
                    answer.cancel("the response was given back")
            return status
        finally:
            if is_recorded:
                operation, url = self._entry.endpoint.operation, self._entry.path
                self._tracer.record(background_span(trace, url=url, operation=operation, response=record.id))

    async def _answer(
        self, record: ResponseRecord, content: Content, tenant: Tenant, trace: RequestTrace
    ) -> tuple[ResponseRequest, Answer]:
        """Raises ServingError."""
        read: ResponseRequest = await off_loop(len(content.body), self._entry.parse, content.body)
        body, ask = await self._memory.recalled(read, record.tenant, len(content.body))
        trace.attributes |= self._entry.endpoint.describe(body)
        origin = Origin(tenant, trace.context, trace.began_at)
        own_name = self._answers.catalogue.choose(ask.model, Asker(record.id, tenant.name))
        answer = await self._answers.start(ask, origin, self._answers.check(ask, tenant, own_name))
        answer.id, answer.created = record.id, record.created_at
        trace.answered = partial(describe_answer, answer)
        return body, answer

    async def _told(
        self, record: ResponseRecord, content: Content, body: ResponseRequest, answer: Answer, trace: RequestTrace
    ) -> str:
        """Run an answer and store it. Raises LaterError, SupersededError."""
        answer.observer = metrics = AnswerMetrics(self._gateway_metrics, answer, trace.began_at)
        record = await self._change(record, _in_progress)
        try:
            if record.keeps_events:
                status = await self._streamed(record, content, body, answer, metrics)
            else:
                told = await self._entry.endpoint.whole(body, answer)
                status = await self._end(record, content, told, body)
            trace.status = 200
            metrics.ended()
            return status
        except ServingError as error:
            metrics.failed(error.code)
            trace.status, trace.error = problem_of(error).status, error.code
            if self._leaving and isinstance(error, UnavailableError):
                raise LaterError(error) from error
            return await self._failed(record, content, problem_of(error))
        finally:
            metrics.ended()

    async def _streamed(
        self, record: ResponseRecord, content: Content, body: ResponseRequest, answer: Answer, metrics: AnswerMetrics
    ) -> str:
        """Stream an answer into the storage. Raises ServingError if nothing was stored yet; SupersededError."""
        writing = self._entry.endpoint.events(body, answer)
        assert isinstance(writing, ResponseEvents)
        stream = KeptStream(self._store, record, writing, metrics)
        stream.delivery = answer.deliver(stream)
        try:
            while not stream.over.done():
                await asyncio.wait({stream.over}, timeout=FLUSH_S)
                await stream.write()
        finally:
            stream.delivery.stop()
        error = stream.over.exception()
        if error is None:
            told, closing = writing.making.ended(), writing.closing()
        elif self._leaving and not stream.kept_bytes and isinstance(error, UnavailableError):
            raise error
        else:
            problem = problem_of(error) if isinstance(error, ServingError) else INTERNAL
            metrics.failed(problem.code)
            told, closing = writing.making.failed(problem), writing.failed(problem)
        record = msgspec.structs.replace(record, bytes=record.bytes + stream.kept_bytes)
        status = await self._end(record, content, told, body)
        if status:
            await stream.write(closing)
        return status

    async def _end(self, record: ResponseRecord, content: Content, told: Json, body: ResponseRequest) -> str:
        """Store a response's end; "" if another gateway ended it."""
        ended = Content(input=content.input, object=await asyncio.to_thread(_encode, told))
        if told["status"] != "failed":
            await self._memory.add_to_conversation(body.history, ended, told)
        last = record.to(told["status"])
        return last.status if await insisting(partial(self._store.end, last, ended)) else ""

    async def _failed(self, record: ResponseRecord, content: Content, problem: Problem) -> str:
        told = await off_loop(record.bytes, msgspec.json.decode, content.object)
        told |= {"status": "failed", "error": error_of(problem)}
        ended = Content(input=content.input, object=await asyncio.to_thread(_encode, told))
        last = msgspec.structs.replace(record, status="failed")
        return "failed" if await insisting(partial(self._store.end, last, ended)) else ""


def _begun(record: ResponseRecord, starts: int) -> ResponseRecord:
    return msgspec.structs.replace(record, starts=starts)


def _in_progress(record: ResponseRecord) -> ResponseRecord:
    return record if record.status == "in_progress" else record.to("in_progress")


def _given_back(record: ResponseRecord, starts: int) -> ResponseRecord:
    if record.is_over or record.starts != starts:
        return record
    return msgspec.structs.replace(record, status="queued", starts=starts - 1)


def _delay(num_delivered: int, asked_s: float) -> float:
    """Seconds until the next try: exponential, at least the requested delay, with jitter."""
    grown_s = RETRY_S * 2.0 ** min(num_delivered - 1, 10)
    return min(MAX_DELAY_S, max(asked_s, grown_s)) * (0.75 + 0.5 * random.random())
