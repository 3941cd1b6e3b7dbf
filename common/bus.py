"""The message bus: NATS core for requests, frames and heartbeats; a JetStream work queue for jobs (`common.job_queue`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from common import subjects
from common.errors import NobodyListensError, UnavailableError, text_of
from common.job_queue import Delivery, JobQueue, JobStream, QueueLimits
from common.log import Outage
from common.messages import Ack, Job, encode
from common.messages.arrivals import COMPLAINTS_A_SECOND, Arrivals, RateLimit
from common.tasks import Ready, cancel_all
from common.tracing import in_trace
from common.wire import ERRORS, NatsSettings, Wire, identity_of

__all__ = [
    "Bus",
    "Delivery",
    "JobQueue",
    "NatsBus",
    "NatsSettings",
    "QueueLimits",
    "Subscription",
    "connect_bus",
    "identity_of",
]

log = logging.getLogger("baton.bus")

M = TypeVar("M")
MAX_HANDLERS = 256  # concurrent handler tasks of one subscription
HEARD_S = 1  # wait for the server to confirm a subscription

_LOST = (nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError, OSError)  # the connection, whatever the error


class Subscription(Protocol):
    async def close(self) -> None: ...


class Bus(Protocol):
    """Messages between processes. Every call raises UnavailableError when the bus can't do it now."""

    @property
    def connected(self) -> bool: ...

    @property
    def malformed(self) -> int: ...

    @property
    def forged(self) -> int: ...

    @property
    def dead_letters(self) -> int: ...

    @property
    def reconnects(self) -> int:
        """Connections lost so far; jobs may have been lost with them."""
        ...

    def refuse(self, subject: str, why: str) -> None:
        """Count a message whose sender had no permission to send it."""
        ...

    def publish(self, subject: str, message: msgspec.Struct) -> Awaitable[None]:
        """Send one way. While disconnected, messages are stored up to a bound and sent later."""
        ...

    async def flush(self, timeout_s: float) -> None:
        """Wait until the server has received everything published: it then survives this process. Raises UnavailableError."""
        ...

    async def request(
        self, subject: str, message: msgspec.Struct, decoder: msgspec.msgpack.Decoder[M], *, timeout_s: float
    ) -> M:
        """Ask and return the answer. Raises NobodyListensError at once, UnavailableError when no answer comes in time."""
        ...

    async def serve(
        self,
        subject: str,
        decoder: msgspec.msgpack.Decoder[M],
        handler: Callable[[M], Awaitable[msgspec.Struct | None]],
    ) -> Subscription:
        """Run `handler` for each message, concurrently and in its trace; reply with its result if one is asked for.

        One that is no coroutine function, and returns what is `Ready`, runs at once and in order.
        Once it returns, the server has the subscription: whoever is told of it later is heard.
        """
        ...

    async def subscribe(
        self, subject: str, decoder: msgspec.msgpack.Decoder[M], handler: Callable[[M], None]
    ) -> Subscription:
        """Call `handler` for each message, in order and in its trace."""
        ...

    async def publish_job(self, worker: str, job: Job) -> int:
        """Queue a job for `worker` and return its stream sequence. Raises OverloadedError when the queue is full."""
        ...

    async def delete_job(self, stream_seq: int, job: Job) -> None:
        """Remove a job that nobody started; best effort. Leaves the message alone if `stream_seq` is another job's by now."""
        ...

    async def bury_job(self, worker: str, job: Job, *, reason: str) -> None:
        """Copy an abandoned job to the dead letters; best effort."""
        ...

    async def has_job(self, stream_seq: int) -> bool:
        """Return True if the queue holds a job, waiting or delivered. Raises UnavailableError."""
        ...

    async def jobs(self, worker: str) -> JobQueue:
        """Return the queue that `worker` pulls its jobs from."""
        ...


@contextlib.asynccontextmanager
async def connect_bus(
    settings: NatsSettings, *, name: str, limits: QueueLimits | None = None, owns_streams: bool = True
) -> AsyncIterator[NatsBus]:
    """Connect; with `owns_streams` (gateways) create the streams and bury jobs delivered too often. Raises as `Wire.open`."""
    bus = NatsBus(limits or QueueLimits(), owns_streams=owns_streams)
    try:
        await bus.connect(settings, name=name)
        yield bus
    finally:
        await bus.close()


class NatsBus:
    """`Bus` on one NATS connection that reconnects for ever."""

    def __init__(self, limits: QueueLimits, *, owns_streams: bool = True) -> None:
        self.reconnects = 0
        self.errors = 0
        self._client = Wire()
        self._client.on_error.append(self._on_error)
        self._client.on_return.append(self._on_return)
        self._stream = JobStream(self._client, limits, owned=owns_streams)
        self._tasks: set[asyncio.Task[None]] = set()
        self._complaints = RateLimit(COMPLAINTS_A_SECOND)
        self._outage = Outage(log, "nats")
        self._arrivals = Arrivals(self._bury)

    async def connect(self, settings: NatsSettings, *, name: str) -> None:
        """Connect, and open the queue of jobs. Raises as `Wire.open`."""
        await self._client.open(settings, name=name)
        await self._stream.open()
        self._outage.ended()

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def malformed(self) -> int:
        """Messages that no decoder accepted."""
        return self._arrivals.malformed + self._stream.malformed

    @property
    def forged(self) -> int:
        """Messages sent in another's name, or with a reply address outside the inbox prefix."""
        return self._arrivals.forged

    @property
    def dead_letters(self) -> int:
        """Jobs and messages that this process copied to the dead letters."""
        return self._stream.dead_letters

    def refuse(self, subject: str, why: str) -> None:
        self._arrivals.refuse(subject, why)

    async def close(self) -> None:
        """Flush what was published and disconnect."""
        await cancel_all(self._tasks)
        await self._client.leave()

    # -- core ------------------------------------------------------------------------------------------------------

    def publish(self, subject: str, message: msgspec.Struct) -> Ready[None]:
        try:
            self._client.say(subject, encode(message))
        except ERRORS as error:  # includes OutboundBufferLimitError: the client's buffer is full
            raise UnavailableError(f"could not publish: {text_of(error)}") from error
        return Ready(None)

    async def flush(self, timeout_s: float) -> None:
        try:
            await self._client.flush(timeout_s)
        except ERRORS as error:
            raise UnavailableError(f"could not flush: {text_of(error)}") from error

    async def request(
        self, subject: str, message: msgspec.Struct, decoder: msgspec.msgpack.Decoder[M], *, timeout_s: float
    ) -> M:
        if not self.connected:
            raise UnavailableError("not connected to NATS")
        try:
            reply = await self._client.ask(subject, encode(message), timeout_s=max(timeout_s, 0.001))
        except nats.errors.NoRespondersError as error:
            raise NobodyListensError(f"nobody listens on {subject}") from error
        except ERRORS as error:
            raise UnavailableError(f"no answer on {subject}: {text_of(error)}") from error
        answer = self._arrivals.take(reply, decoder)
        if answer is None:
            raise UnavailableError(f"malformed answer on {subject}")
        return answer

    async def serve(
        self,
        subject: str,
        decoder: msgspec.msgpack.Decoder[M],
        handler: Callable[[M], Awaitable[msgspec.Struct | None]],
    ) -> Subscription:
        if not asyncio.iscoroutinefunction(handler):
            return await self._hear(subject, decoder, lambda message: _result(handler(message)), Ack(known=False))
        slots = asyncio.Semaphore(MAX_HANDLERS)

        async def answer(raw: Msg, message: M) -> None:
            with in_trace(getattr(message, "traceparent", "")):
                try:
                    result = await handler(message)
                except Exception:  # a handler's bug costs its own message, never the subscription
                    log.exception("bus.handler_failed", extra={"subject": subject})
                    result = Ack(known=False)
                finally:
                    slots.release()
            if raw.reply and result is not None:
                with contextlib.suppress(*ERRORS):
                    self._client.say(raw.reply, encode(result))

        async def receive(raw: Msg) -> None:
            message = self._arrivals.take(raw, decoder)
            if message is not None:
                await slots.acquire()  # meanwhile the client buffers incoming messages
                self._spawn(answer(raw, message))

        return await self._subscribe(subject, self._client.subscribe(subject, cb=receive))

    async def subscribe(
        self, subject: str, decoder: msgspec.msgpack.Decoder[M], handler: Callable[[M], None]
    ) -> Subscription:
        return await self._hear(subject, decoder, handler)

    async def _hear(
        self,
        subject: str,
        decoder: msgspec.msgpack.Decoder[M],
        handler: Callable[[M], msgspec.Struct | None],
        failed: msgspec.Struct | None = None,
    ) -> Subscription:
        """Run `handler` synchronously as a message is read, and reply with its result, or with `failed` if it raises."""

        def take(raw: Msg) -> None:
            if (message := self._arrivals.take(raw, decoder)) is None:
                return
            with in_trace(getattr(message, "traceparent", "")):
                try:
                    result = handler(message)
                except Exception:  # as in `serve`
                    log.exception("bus.handler_failed", extra={"subject": subject})
                    result = failed
            if raw.reply and result is not None:
                with contextlib.suppress(*ERRORS):
                    self._client.say(raw.reply, encode(result))

        return await self._subscribe(subject, self._client.hear(subject, take))

    async def _subscribe(self, subject: str, subscribing: Awaitable[NatsSubscription]) -> Subscription:
        try:
            subscription = _Subscription(await subscribing)
        except ERRORS as error:
            raise UnavailableError(f"could not subscribe to {subject}: {text_of(error)}") from error
        with contextlib.suppress(*ERRORS):  # a client that is reconnecting subscribes again by itself
            for _ in range(2):  # the first ping is written ahead of what the client has buffered
                await self._client.flush(HEARD_S)
        return subscription

    # -- jobs ------------------------------------------------------------------------------------------------------

    async def publish_job(self, worker: str, job: Job) -> int:
        return await self._stream.publish(worker, job)

    async def delete_job(self, stream_seq: int, job: Job) -> None:
        await self._stream.delete(stream_seq, job)

    async def bury_job(self, worker: str, job: Job, *, reason: str) -> None:
        await self._stream.dead_letter("job", encode(job), subject=subjects.jobs(worker), reason=reason)

    async def has_job(self, stream_seq: int) -> bool:
        return await self._stream.has(stream_seq)

    async def jobs(self, worker: str) -> JobQueue:
        return await self._stream.queue(worker)

    # -- connection ------------------------------------------------------------------------------------------------

    def _bury(self, raw: Msg, reason: str) -> None:
        self._spawn(self._stream.dead_letter("malformed", raw.data, subject=raw.subject, reason=reason))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_error(self, error: Exception) -> None:
        self.errors += 1
        if "permissions violation" in str(error).lower():
            log.error("bus.not_permitted", extra={"error": text_of(error), "remedy": "renew the users: `baton users`"})
        elif not self.connected or isinstance(error, _LOST):
            self._outage.failed(text_of(error))
        elif self._complaints.allows():
            log.warning("bus.error", extra={"error": text_of(error), "errors": self.errors})

    async def _on_return(self) -> None:
        self.reconnects += 1
        self._outage.ended()
        log.info("bus.reconnected", extra={"reconnects": self.reconnects})
        with contextlib.suppress(UnavailableError):  # the next use tries again
            await self._stream.ensure()


class _Subscription:
    def __init__(self, inner: NatsSubscription) -> None:
        self._inner = inner

    async def close(self) -> None:
        with contextlib.suppress(*ERRORS):
            await self._inner.unsubscribe()


def _result(ready: Awaitable[msgspec.Struct | None]) -> msgspec.Struct | None:
    assert isinstance(ready, Ready), "it needs a task to wait in"
    result: msgspec.Struct | None = ready.result
    return result
