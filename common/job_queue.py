"""The work queue of jobs, on JetStream: a memory stream, one durable pull consumer a worker, dead letters.

Measured facts behind it (docs/operations.md):
- A pull left behind on the server swallows the next job for a whole ack-wait. So pulls are short and never cancelled, and
  none is sent while disconnected, where the client would store it.
- A client's pull for several jobs holds the first back until the others came or the pull expired. So a pull takes what is
  there without waiting, or waits for one job.
- A job past `max_deliver` stays in the stream for ever unless somebody moves it away.
- A restarted server has lost memory streams and their consumers; the first to notice creates them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from common import subjects
from common.errors import InvalidRequestError, MalformedMessageError, OverloadedError, UnavailableError, text_of
from common.messages import Job, decode, encode, job_decoder
from common.wire import ERRORS, MESSAGE_ID, Wire, add_stream

log = logging.getLogger("baton.job_queue")

API_TIMEOUT_S = 2.0
RETRY_PAUSE_S = 0.2  # after a failed pull: no hot loop, short against any deadline
MALFORMED_MAX_BYTES = 64 << 10  # longer malformed messages are truncated in the dead letters
DEAD_MAX_MESSAGES = 10_000
DEAD_MAX_BYTES = 64 << 20
BURY_TRIES, BURY_AGAIN_S = 10, 0.5  # an unburied job would stay for `max_age_s`
ADVISORIES = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{subjects.JOBS_STREAM}.*"

# JetStream's error codes: out of resources, storage, memory, or stream full.
_FULL = frozenset({10023, 10028, 10047, 10077})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits of the queue: how long and how often jobs are delivered, and how many may wait."""

    ack_wait_s: float = 5.0  # workers send `in_progress` each second
    max_deliver: int = 3
    max_ack_pending: int = 1_000  # unacknowledged deliveries of one worker
    max_jobs: int = 100_000
    max_bytes: int = 128 << 20  # half of what deploy/nats/nats.conf gives to memory streams
    max_age_s: float = 3_600.0
    duplicate_window_s: float = 120.0
    idle_consumer_s: float = 60.0  # an idle consumer is deleted after this; its jobs stay


class Delivery(Protocol):
    """One delivery of a job. Without `ack` or `term` it comes again after the ack-wait."""

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


class JobStream:
    """The stream of all jobs and the stream of dead letters."""

    def __init__(self, client: Wire, limits: QueueLimits, *, owned: bool = True) -> None:
        """`owned`: this process may create the streams; others wait for them."""
        self.owned = owned
        self.limits = limits
        self.malformed = 0
        self.dead_letters = 0
        self._client = client
        self._jetstream = client.jetstream(timeout=API_TIMEOUT_S)

    async def open(self) -> None:
        """Create the streams, if they are ours, and watch for jobs that reached `max_deliver`. Raises UnavailableError."""
        if not self.owned:
            return
        await self.ensure()
        await self._client.subscribe(ADVISORIES, cb=self._on_max_deliveries, queue="baton-dead-letters")

    async def ensure(self) -> None:
        """Create or update the streams if they are ours. Raises UnavailableError."""
        if not self.owned:
            return
        jobs = StreamConfig(
            name=subjects.JOBS_STREAM,
            subjects=["baton.jobs.*"],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.MEMORY,
            discard=DiscardPolicy.NEW,
            max_age=self.limits.max_age_s,
            max_msgs=self.limits.max_jobs,
            max_bytes=self.limits.max_bytes,
            duplicate_window=self.limits.duplicate_window_s,
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
                    await add_stream(self._jetstream, config)
                except nats.js.errors.BadRequestError:  # another release created it: the last process to start decides
                    await self._update(config)
        except ERRORS as error:
            raise UnavailableError(f"JetStream is not ready: {text_of(error)}") from error

    async def _update(self, config: StreamConfig) -> None:
        try:
            await self._jetstream.update_stream(config)
        except nats.js.errors.APIError as error:
            remedy = f"stop all gateways, delete it (nats stream rm {config.name}), start them again"
            raise UnavailableError(
                f"stream {config.name} can't become this release's: {text_of(error)}; {remedy}"
            ) from error

    async def publish(self, worker: str, job: Job) -> int:
        """Queue a job and return its sequence. The same (request, attempt) again is stored once."""
        if not self._client.is_connected:  # the client would buffer it and send it later
            raise UnavailableError("not connected to NATS")
        subject, raw, name = subjects.jobs(worker), encode(job), _message_id(job)
        try:
            try:
                return await self._client.store(subject, raw, name=name, timeout_s=API_TIMEOUT_S)
            except nats.errors.NoRespondersError:  # the server was restarted
                await self.ensure()
                return await self._client.store(subject, raw, name=name, timeout_s=API_TIMEOUT_S)
        except nats.errors.MaxPayloadError as error:
            raise InvalidRequestError("the prompt is larger than the bus carries (max_payload of NATS)") from error
        except nats.js.errors.APIError as error:
            if error.err_code in _FULL:
                raise OverloadedError(f"the job queue takes no more: {error.description}") from error
            raise UnavailableError(f"could not queue the job: {error.description}") from error
        except ERRORS as error:
            raise UnavailableError(f"could not queue the job: {text_of(error)}") from error

    async def delete(self, stream_seq: int, job: Job) -> None:
        """Remove a job from the queue; best effort. A restarted server reuses sequence numbers, so check whose message it is."""
        with contextlib.suppress(*ERRORS):
            message = await self._jetstream.get_msg(subjects.JOBS_STREAM, stream_seq)
            if (message.headers or {}).get(MESSAGE_ID) == _message_id(job):
                await self._jetstream.delete_msg(subjects.JOBS_STREAM, stream_seq)

    async def has(self, stream_seq: int) -> bool:
        """Return True if a job is in the queue. Raises UnavailableError."""
        try:
            await self._jetstream.get_msg(subjects.JOBS_STREAM, stream_seq)
        except nats.js.errors.NotFoundError:
            return False
        except ERRORS as error:
            raise UnavailableError(f"could not look for the job: {text_of(error)}") from error
        return True

    async def queue(self, worker: str) -> NatsJobQueue:
        """Return `worker`'s queue, its consumer created or updated. Raises UnavailableError if the streams are ours.

        Otherwise there may be no stream yet: the queue then opens with the first fetch that can.
        """
        queue = NatsJobQueue(self, self._client, worker)
        try:
            await queue.open()
        except UnavailableError:
            if self.owned:
                raise
        return queue

    async def ensure_consumer(self, name: str, worker: str) -> None:
        """Create or update `worker`'s consumer, and the stream if it is gone."""
        config = ConsumerConfig(
            name=name,
            durable_name=name,
            filter_subject=subjects.jobs(worker),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.limits.ack_wait_s,
            max_deliver=self.limits.max_deliver,
            max_ack_pending=self.limits.max_ack_pending,
            inactive_threshold=self.limits.idle_consumer_s,
        )
        try:
            try:
                await self._jetstream.add_consumer(subjects.JOBS_STREAM, config)
            except nats.js.errors.NotFoundError:
                await self.ensure()
                await self._jetstream.add_consumer(subjects.JOBS_STREAM, config)
        except ERRORS as error:
            raise UnavailableError(f"could not open the job queue: {text_of(error)}") from error

    async def dead_letter(self, kind: str, raw: bytes, *, subject: str, reason: str, known_as: str = "") -> None:
        """Copy a job or message to the dead letters, best effort; once for each `known_as`. `kind` is `job` or `malformed`."""
        self.dead_letters += 1
        headers = {"Baton-Subject": subject, "Baton-Reason": reason[:200], "Baton-Bytes": str(len(raw))}
        headers |= {MESSAGE_ID: known_as} if known_as else {}
        kept = raw[:MALFORMED_MAX_BYTES] if kind == "malformed" else raw
        with contextlib.suppress(*ERRORS):
            await self._jetstream.publish(subjects.dead_letter(kind), kept, headers=headers)

    async def _on_max_deliveries(self, raw: Msg) -> None:
        """Move a job that was delivered `max_deliver` times to the dead letters. The server reports it once."""
        try:
            advisory = msgspec.json.decode(raw.data, type=_MaxDeliveries)
        except msgspec.MsgspecError as error:
            log.warning("job_queue.dead_letter_failed", extra={"error": text_of(error)})
            return
        for tries_left in reversed(range(BURY_TRIES)):
            try:
                await self._bury(advisory)
                return
            except nats.js.errors.NotFoundError:
                return  # acked or deleted meanwhile
            except ERRORS as error:
                if not tries_left:
                    log.warning("job_queue.dead_letter_failed", extra={"error": text_of(error)})
            await asyncio.sleep(BURY_AGAIN_S)

    async def _bury(self, advisory: _MaxDeliveries) -> None:
        message = await self._jetstream.get_msg(subjects.JOBS_STREAM, advisory.stream_seq)
        reason, known_as = f"delivered {advisory.deliveries} times", (message.headers or {}).get(MESSAGE_ID, "")
        await self.dead_letter(
            "job", message.data or b"", subject=message.subject or "", reason=reason, known_as=known_as
        )
        await self._jetstream.delete_msg(subjects.JOBS_STREAM, advisory.stream_seq)
        log.warning("job_queue.dead_letter", extra={"subject": message.subject, "reason": reason})


class NatsJobQueue:
    """`JobQueue` on a durable pull consumer, created again when the server lost it."""

    def __init__(self, stream: JobStream, client: Wire, worker: str) -> None:
        self._stream = stream
        self._client = client
        self._worker = worker
        self._consumer = f"worker-{subjects.check_id(worker)}"
        self._inbox = client.new_inbox()
        self._arrivals: NatsSubscription | None = None
        self._pulls = 0
        self._lost = True
        self._told = False

    async def open(self) -> None:
        """Create or update the consumer. Raises UnavailableError."""
        await self._stream.ensure_consumer(self._consumer, self._worker)
        if self._arrivals is None:
            try:
                self._arrivals = await self._client.subscribe(f"{self._inbox}.*")
            except ERRORS as error:
                raise UnavailableError(f"could not open the job queue: {text_of(error)}") from error
        self._lost = self._told = False

    async def fetch(self, max_jobs: int, *, expires_s: float = 1.0) -> list[Delivery]:
        """Return what is queued, or the next job within `expires_s`. Transient errors are logged and return []."""
        if not self._client.is_connected:
            await asyncio.sleep(min(RETRY_PAUSE_S, expires_s))
            return []
        try:
            if self._lost:
                await self.open()
            messages = await self._arrived(max_jobs)
            if not messages:
                messages = await self._pull(max_jobs, wait_s=0.0)
            if not messages and not self._lost:
                messages = await self._pull(1, wait_s=expires_s)
        except (*ERRORS, UnavailableError) as error:
            if not self._told:
                log.warning("job_queue.fetch_failed", extra={"error": text_of(error)})
            self._lost = self._told = True
            await asyncio.sleep(min(RETRY_PAUSE_S, expires_s))
            return []
        deliveries = [await self._delivery(message) for message in messages]
        return [delivery for delivery in deliveries if delivery is not None]

    async def _arrived(self, max_jobs: int) -> list[Msg]:
        """Take jobs that arrived after their pull timed out: the server has delivered them, so they are processed."""
        assert self._arrivals is not None
        jobs: list[Msg] = []
        while self._arrivals.pending_msgs and len(jobs) < max_jobs:
            message = await self._arrivals.next_msg(timeout=API_TIMEOUT_S)
            if not self._is_status(message):
                jobs.append(message)
        return jobs

    async def _pull(self, batch: int, *, wait_s: float) -> list[Msg]:
        """Pull up to `batch` jobs: those queued now, or with `wait_s` the ones that arrive. Ends on a status or timeout."""
        assert self._arrivals is not None
        self._pulls += 1
        reply = f"{self._inbox}.{self._pulls}"
        request = {"batch": batch, "expires": int(wait_s * 1e9)} if wait_s else {"batch": batch, "no_wait": True}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.JOBS_STREAM}.{self._consumer}"
        await self._client.publish(subject, json.dumps(request).encode(), reply=reply)
        jobs: list[Msg] = []
        give_up_at = asyncio.get_running_loop().time() + wait_s + API_TIMEOUT_S
        while len(jobs) < batch:
            left = give_up_at - asyncio.get_running_loop().time()
            try:
                message = await self._arrivals.next_msg(timeout=max(left, 0.001))
            except TimeoutError:
                self._lost = True  # no status came: check that the server still knows the consumer
                break
            if not self._is_status(message):
                jobs.append(message)
            elif message.subject == reply:
                status = (message.headers or {}).get("Status", "")
                # 404 no messages, 408 timeout; 409 and 503: the consumer was deleted or is unknown
                self._lost = status not in ("404", "408")
                break
        return jobs

    def _is_status(self, message: Msg) -> bool:
        return message.subject.startswith(self._inbox)

    async def _delivery(self, raw: Msg) -> Delivery | None:
        if raw.subject != subjects.jobs(self._worker):
            self._lost = True  # once recreated, the consumer belongs to its worker
            return None
        try:
            return NatsDelivery(raw, decode(job_decoder, raw.data))
        except (MalformedMessageError, RecursionError) as error:
            self._stream.malformed += 1
            log.warning("job_queue.malformed", extra={"error": text_of(error)})
            await self._stream.dead_letter("malformed", raw.data, subject=raw.subject, reason=text_of(error))
            with contextlib.suppress(*ERRORS):
                await raw.term()
            return None


class NatsDelivery:
    """`Delivery` of JetStream. Ending it twice does nothing."""

    def __init__(self, raw: Msg, job: Job) -> None:
        self._raw = raw
        self.job = job
        self.num_delivered: int = raw.metadata.num_delivered or 1

    async def ack(self) -> None:
        await self._say(self._raw.ack())

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._say(self._raw.nak(delay=delay_s or None))

    async def term(self) -> None:
        await self._say(self._raw.term())

    async def in_progress(self) -> None:
        await self._say(self._raw.in_progress())

    async def _say(self, call: Awaitable[None]) -> None:
        try:
            await call
        except nats.errors.MsgAlreadyAckdError:
            return
        except ERRORS as error:
            raise UnavailableError(f"could not answer for the job: {text_of(error)}") from error


def _message_id(job: Job) -> str:
    return f"{job.request_id}:{job.attempt}"


class _MaxDeliveries(msgspec.Struct):
    stream_seq: int
    deliveries: int
