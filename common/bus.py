"""The message bus: NATS core for requests, frames and heartbeats; a JetStream work queue for jobs.

What the rest of Baton sees is `Bus` and `JobQueue`; `NatsBus` is the implementation, `tests/fakes/bus.py` has one in memory.
Facts behind the settings here (measured, see docs/operations.md): a client without `max_reconnect_attempts=-1` closes for
good after two minutes; a cancelled `fetch` swallows the next job for a whole ack-wait, so pulls are short and never
cancelled; a job past `max_deliver` stays in the stream for ever unless somebody moves it away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from common import subjects
from common.errors import MalformedMessageError, OverloadedError, UnavailableError
from common.messages import Ack, Job, decode, encode, job_decoder

log = logging.getLogger("baton.bus")

M = TypeVar("M")

ACK_WAIT_S = 5.0
MAX_DELIVER = 3
MAX_HANDLERS = 256  # concurrent handler tasks of one subscription
JOB_MAX_AGE_S = 3600.0
JOB_MAX_MESSAGES = 100_000
DEAD_MAX_MESSAGES = 10_000
DEAD_MAX_BYTES = 64 << 20
API_TIMEOUT_S = 2.0
ADVISORIES = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{subjects.JOBS_STREAM}.*"


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """How to reach NATS."""

    url: str = "nats://127.0.0.1:4222"
    user: str | None = None
    password: str | None = None


class Delivery(Protocol):
    """One delivery of a job. After `ack` or `term` it is over; without either it comes again after the ack-wait."""

    job: Job
    num_delivered: int

    async def ack(self) -> None: ...
    async def nak(self, delay_s: float = 0.0) -> None: ...
    async def term(self) -> None: ...
    async def in_progress(self) -> None: ...


class JobQueue(Protocol):
    """One worker's share of the work queue."""

    async def fetch(self, max_jobs: int, *, expires_s: float = 1.0) -> list[Delivery]:
        """Return up to `max_jobs` jobs as soon as there is one, [] after `expires_s`. Must not be cancelled."""
        ...


class Subscription(Protocol):
    async def close(self) -> None: ...


class Bus(Protocol):
    """Messages between processes. Every call raises UnavailableError when the bus can't do it now."""

    malformed: int
    dead_letters: int
    reconnects: int

    @property
    def connected(self) -> bool: ...

    async def publish(self, subject: str, message: msgspec.Struct) -> None: ...

    async def request(
        self, subject: str, message: msgspec.Struct, decoder: msgspec.msgpack.Decoder[M], *, timeout_s: float
    ) -> M:
        """Ask and return the answer. Raises UnavailableError when nobody listens or answers in time."""
        ...

    async def serve(
        self,
        subject: str,
        decoder: msgspec.msgpack.Decoder[M],
        handler: Callable[[M], Awaitable[msgspec.Struct | None]],
    ) -> Subscription:
        """Run `handler` for every message, concurrently; its result is the answer if one is asked for."""
        ...

    async def subscribe(
        self, subject: str, decoder: msgspec.msgpack.Decoder[M], handler: Callable[[M], None]
    ) -> Subscription:
        """Call `handler` for every message, in order."""
        ...

    async def publish_job(self, worker: str, job: Job) -> int:
        """Queue a job for `worker` and return its stream sequence. Raises OverloadedError when the queue is full."""
        ...

    async def delete_job(self, stream_seq: int) -> None:
        """Take a job that nobody started out of the queue; best effort."""
        ...

    async def jobs(self, worker: str) -> JobQueue: ...


@contextlib.asynccontextmanager
async def connect_bus(settings: NatsSettings, *, name: str) -> AsyncIterator[NatsBus]:
    """Connect and create the streams. Raises UnavailableError, naming the URL, when no server answers."""
    bus = NatsBus()
    await bus.connect(settings, name=name)
    try:
        yield bus
    finally:
        await bus.close()


class NatsBus:
    """`Bus` on one NATS connection that reconnects for ever."""

    def __init__(self) -> None:
        self.malformed = 0
        self.dead_letters = 0
        self.reconnects = 0
        self.slow_consumer_drops = 0
        self._nats: Client = Client()
        self._jetstream: JetStreamContext
        self._tasks: set[asyncio.Task[Any]] = set()

    async def connect(self, settings: NatsSettings, *, name: str) -> None:
        """Connect, or raise UnavailableError."""
        try:
            await self._nats.connect(
                settings.url,
                name=name,
                user=settings.user,
                password=settings.password,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.1 + random.random() * 0.1,
                connect_timeout=2,
                ping_interval=1,
                max_outstanding_pings=2,
                pending_size=32 << 20,
                error_cb=self._on_error,
                reconnected_cb=self._on_reconnected,
            )
        except (OSError, nats.errors.Error, TimeoutError) as error:
            raise UnavailableError(f"no NATS server at {settings.url}: {error}") from error
        self._jetstream = self._nats.jetstream(timeout=API_TIMEOUT_S)
        await self.ensure_streams()
        await self._nats.subscribe(ADVISORIES, cb=self._on_max_deliveries, queue="baton-dead-letters")

    @property
    def connected(self) -> bool:
        return self._nats.is_connected

    async def close(self) -> None:
        """Flush what was published and disconnect."""
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._nats.flush(), 1.0)
        with contextlib.suppress(Exception):
            await self._nats.close()

    # -- core ------------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, message: msgspec.Struct) -> None:
        try:
            await self._nats.publish(subject, encode(message))
        except (nats.errors.Error, OSError) as error:
            raise UnavailableError(f"could not publish: {error}") from error

    async def request(
        self, subject: str, message: msgspec.Struct, decoder: msgspec.msgpack.Decoder[M], *, timeout_s: float
    ) -> M:
        if not self.connected:
            raise UnavailableError("not connected to NATS")
        try:
            reply = await self._nats.request(subject, encode(message), timeout=max(timeout_s, 0.001))
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise UnavailableError(f"no answer on {subject}: {error or type(error).__name__}") from error
        try:
            return decode(decoder, reply.data)
        except MalformedMessageError as error:
            self.malformed += 1
            raise UnavailableError(f"malformed answer on {subject}: {error}") from error

    async def serve(
        self,
        subject: str,
        decoder: msgspec.msgpack.Decoder[M],
        handler: Callable[[M], Awaitable[msgspec.Struct | None]],
    ) -> Subscription:
        slots = asyncio.Semaphore(MAX_HANDLERS)

        async def answer(raw: Msg, message: M) -> None:
            try:
                result = await handler(message)
            except Exception:
                log.exception("bus.handler_failed", extra={"subject": subject})
                result = Ack(known=False)
            finally:
                slots.release()
            if raw.reply and result is not None:
                with contextlib.suppress(nats.errors.Error, OSError):
                    await self._nats.publish(raw.reply, encode(result))

        async def receive(raw: Msg) -> None:
            message = self._decode(raw, decoder)
            if message is not None:
                await slots.acquire()
                self._spawn(answer(raw, message))

        return _Subscription(await self._nats.subscribe(subject, cb=receive))

    async def subscribe(
        self, subject: str, decoder: msgspec.msgpack.Decoder[M], handler: Callable[[M], None]
    ) -> Subscription:
        async def receive(raw: Msg) -> None:
            message = self._decode(raw, decoder)
            if message is None:
                return
            try:
                handler(message)
            except Exception:
                log.exception("bus.handler_failed", extra={"subject": subject})

        return _Subscription(await self._nats.subscribe(subject, cb=receive))

    def _decode(self, raw: Msg, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
        try:
            return decode(decoder, raw.data)
        except MalformedMessageError as error:
            self.malformed += 1
            log.warning("bus.malformed", extra={"subject": raw.subject, "error": error.message[:200]})
            self._spawn(self.dead_letter("malformed", raw.data[: 64 << 10], {"Baton-Subject": raw.subject}))
            return None

    # -- jobs ------------------------------------------------------------------------------------------------------

    async def ensure_streams(self) -> None:
        """Create the streams, or bring them to our configuration. A restarted server has lost the memory streams."""
        jobs = StreamConfig(
            name=subjects.JOBS_STREAM,
            subjects=["baton.jobs.*"],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.MEMORY,
            discard=DiscardPolicy.NEW,
            max_age=JOB_MAX_AGE_S,
            max_msgs=JOB_MAX_MESSAGES,
            duplicate_window=120,
        )
        dead = StreamConfig(
            name=subjects.DEAD_STREAM,
            subjects=["baton.dead.*"],
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_msgs=DEAD_MAX_MESSAGES,
            max_bytes=DEAD_MAX_BYTES,
        )
        try:
            for config in (jobs, dead):
                try:
                    await self._jetstream.add_stream(config)
                except nats.js.errors.BadRequestError:
                    await self._jetstream.update_stream(config)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise UnavailableError(f"JetStream is not ready: {error}") from error

    async def publish_job(self, worker: str, job: Job) -> int:
        headers = {"Nats-Msg-Id": f"{job.request_id}:{job.attempt}"}
        for try_again in (True, False):
            try:
                ack = await self._jetstream.publish(
                    subjects.jobs(worker), encode(job), timeout=API_TIMEOUT_S, headers=headers
                )
                return ack.seq
            except nats.js.errors.NoStreamResponseError as error:
                if not try_again:
                    raise UnavailableError("the job stream is missing") from error
                await self.ensure_streams()
            except nats.js.errors.APIError as error:
                raise OverloadedError(f"the job queue takes no more: {error.description}") from error
            except (nats.errors.Error, OSError, TimeoutError) as error:
                raise UnavailableError(f"could not queue the job: {error or type(error).__name__}") from error
        raise AssertionError("unreachable")

    async def delete_job(self, stream_seq: int) -> None:
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            await self._jetstream.delete_msg(subjects.JOBS_STREAM, stream_seq)

    async def jobs(self, worker: str) -> JobQueue:
        queue = NatsJobQueue(self, self._jetstream, worker)
        await queue.open()
        return queue

    async def dead_letter(self, kind: str, raw: bytes, headers: dict[str, str]) -> None:
        """Keep what was given up, best effort."""
        self.dead_letters += 1
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            await self._jetstream.publish(subjects.dead_letter(kind), raw, headers=headers, timeout=API_TIMEOUT_S)

    async def _on_max_deliveries(self, raw: Msg) -> None:
        """A job was delivered `MAX_DELIVER` times without an end: move it to the dead letters."""
        try:
            sequence = int(msgspec.json.decode(raw.data)["stream_seq"])
            message = await self._jetstream.get_msg(subjects.JOBS_STREAM, sequence)
            await self.dead_letter("job", message.data or b"", {"Baton-Subject": message.subject or ""})
            await self._jetstream.delete_msg(subjects.JOBS_STREAM, sequence)
        except (nats.errors.Error, OSError, TimeoutError, msgspec.MsgspecError, KeyError, ValueError):
            log.warning("bus.dead_letter_failed")

    # -- connection ------------------------------------------------------------------------------------------------

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.slow_consumer_drops += 1
        log.warning("bus.error", extra={"error": f"{type(error).__name__}: {error}"[:200]})

    async def _on_reconnected(self) -> None:
        self.reconnects += 1
        with contextlib.suppress(UnavailableError):
            await self.ensure_streams()
        log.info("bus.reconnected")


class NatsJobQueue:
    """A durable pull consumer on one worker's subject, re-created when the server lost it."""

    def __init__(self, bus: NatsBus, jetstream: JetStreamContext, worker: str) -> None:
        self._bus = bus
        self._jetstream = jetstream
        self._worker = worker
        self._pull: JetStreamContext.PullSubscription | None = None

    async def open(self) -> None:
        """Create or update the consumer."""
        config = ConsumerConfig(
            durable_name=f"worker-{self._worker}",
            filter_subject=subjects.jobs(self._worker),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=MAX_DELIVER,
            inactive_threshold=60.0,
        )
        try:
            self._pull = await self._jetstream.pull_subscribe(
                subjects.jobs(self._worker), durable=config.durable_name, stream=subjects.JOBS_STREAM, config=config
            )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise UnavailableError(f"could not open the job queue: {error}") from error

    async def fetch(self, max_jobs: int, *, expires_s: float = 1.0) -> list[Delivery]:
        try:
            if self._pull is None:
                await self._bus.ensure_streams()
                await self.open()
            assert self._pull is not None
            messages = await self._pull.fetch(max_jobs, timeout=expires_s)
        except (TimeoutError, nats.errors.TimeoutError):
            return []
        except (nats.errors.Error, UnavailableError, OSError) as error:
            log.warning("bus.fetch_failed", extra={"error": str(error)[:200]})
            self._pull = None
            await asyncio.sleep(0.2)
            return []
        return [delivery for message in messages if (delivery := await self._delivery(message)) is not None]

    async def _delivery(self, raw: Msg) -> Delivery | None:
        try:
            return NatsDelivery(raw, decode(job_decoder, raw.data))
        except MalformedMessageError as error:
            self._bus.malformed += 1
            log.warning("bus.malformed_job", extra={"error": error.message[:200]})
            await self._bus.dead_letter("malformed", raw.data[: 64 << 10], {"Baton-Subject": raw.subject})
            with contextlib.suppress(nats.errors.Error, OSError):
                await raw.term()
            return None


class NatsDelivery:
    """A delivery of JetStream. Acks of a delivery that is over do nothing."""

    def __init__(self, raw: Msg, job: Job) -> None:
        self._raw = raw
        self.job = job
        self.num_delivered = raw.metadata.num_delivered or 1

    async def ack(self) -> None:
        await self._end(self._raw.ack())

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._end(self._raw.nak(delay=delay_s or None))

    async def term(self) -> None:
        await self._end(self._raw.term())

    async def in_progress(self) -> None:
        await self._end(self._raw.in_progress())

    async def _end(self, call: Awaitable[None]) -> None:
        try:
            await call
        except nats.errors.MsgAlreadyAckdError:
            return
        except (nats.errors.Error, OSError) as error:
            raise UnavailableError(f"could not ack: {error}") from error


class _Subscription:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def close(self) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self._inner.unsubscribe()
