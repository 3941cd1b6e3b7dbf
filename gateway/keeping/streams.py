"""Stored contents in JetStream, through another connection than the bus, so that they never delay a token.

NATS acknowledges what is on disk (`sync_interval: always`), and nothing is reported before. A `Layout` names two streams:

- the kept one holds one message a subject. `create` writes a subject once, however often it is tried; `replace` writes it if it
  is still what was read.
- the work queue has one message a subject: the same work is not queued twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    RawStreamMsg,
)
from nats.js.client import JetStreamContext

from common.errors import InvalidRequestError, ServingError, UnavailableError, text_of
from common.wire import ERRORS, Wire, add_stream
from gateway.keeping.layout import Layout

API_TIMEOUT_S = 5.0  # a disk may be slow
RETRY_PAUSE_S = 0.5
OPEN_AGAIN_S = 2.0
PULL_S = 1.0
ACK_WAIT_S = 6.0  # a dead gateway's work is redelivered after this
BEAT_S = 2.0
PAGE = 256  # maximum messages of one request
PAGE_BYTES = 8 << 20  # a request returns no further message beyond this
LAST_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
_WRONG_SEQUENCE = 10071
_FULL = frozenset({10023, 10047, 10077})  # JetStream's codes: out of resources, storage, or stream full


class TooLargeError(InvalidRequestError):
    """NATS can't carry a message of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A message as it is kept."""

    subject: str
    seq: int
    data: bytes
    pending: int = 0  # messages left in a scan


class Delivery:
    """Work held exclusively by this process until `done` or `later`."""

    def __init__(self, raw: Msg, forget: Callable[[Delivery], None]) -> None:
        self._raw = raw
        self._forget = forget
        self.data: bytes = raw.data
        self.num_delivered: int = raw.metadata.num_delivered or 1
        self.num_waiting: int = raw.metadata.num_pending or 0

    async def done(self) -> None:
        """Acknowledge: it never comes again, unless the acknowledgement is lost; then it is found to be done."""
        self._forget(self)
        with contextlib.suppress(*ERRORS):
            await self._raw.ack()

    async def later(self, delay_s: float) -> None:
        """Return it for redelivery, here or elsewhere."""
        self._forget(self)
        with contextlib.suppress(*ERRORS):
            await self._raw.nak(delay=max(delay_s, 0.001))

    async def beat(self) -> None:
        """Extend the ack-wait: it is still in progress."""
        with contextlib.suppress(*ERRORS):
            await self._raw.in_progress()


class KeptStreams:
    """Both streams. Every call raises UnavailableError if NATS can't do it now."""

    def __init__(self, wire: Wire, layout: Layout) -> None:
        self.layout = layout
        self._log = logging.getLogger(f"baton.{layout.what}")
        self._client = wire
        self._js: JetStreamContext = self._client.jetstream(timeout=API_TIMEOUT_S)
        self._opening = asyncio.Lock()
        self._is_open = False
        self._failed, self._failed_at = "", 0.0
        self._told = False  # logged that no work can be pulled
        self._pulls: dict[str, JetStreamContext.PullSubscription] = {}
        self._held: set[Delivery] = set()
        self._beating: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to hold work. Streams and consumers are created on demand, also after the server lost them."""
        self._client.on_error.append(self._on_error)
        self._client.on_return.append(self._on_return)
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Release held work, and what the server would still hand to a pull."""
        if self._beating is not None:
            self._beating.cancel()
        for delivery in list(self._held):
            await delivery.later(0)
        for pull in self._pulls.values():
            with contextlib.suppress(*ERRORS):
                await pull.unsubscribe()
        with contextlib.suppress(*ERRORS):
            await self._client.flush(1)

    # -- what is kept ------------------------------------------------------------------------------------------------

    async def create(self, subject: str, data: bytes) -> bool:
        """Write an empty subject; False: it has a message. Raises StoreFullError, or TooLargeError."""
        return await self._publish(subject, data, headers={LAST_SEQUENCE: "0"}) > 0

    async def replace(self, subject: str, data: bytes, *, seq: int) -> int:
        """Write a subject unless it changed since it was read; return its new sequence, or 0."""
        return await self._publish(subject, data, headers={LAST_SEQUENCE: str(seq)})

    async def put(self, subject: str, data: bytes) -> None:
        await self._publish(subject, data)

    async def get(self, subject: str) -> Stored | None:
        """Return the last message of a subject, or None."""
        await self._ensure()
        try:
            raw: RawStreamMsg = await self._js.get_msg(self.layout.kept, subject=subject)
        except nats.js.errors.NotFoundError:
            return None
        except ERRORS as error:
            raise self._unavailable("could not read", error) from error
        _heed_cancellation()
        return Stored(subject=subject, seq=raw.seq or 0, data=raw.data or b"")

    async def scan(self, subject: str, *, after: int = 0) -> AsyncGenerator[Stored, None]:
        """Yield all messages of a wildcard subject after a sequence, oldest first."""
        while True:
            page = await self._read(subject, after=after, limit=PAGE)
            for stored in page:
                yield stored
            if not page or not page[-1].pending:
                return
            after = page[-1].seq

    @contextlib.asynccontextmanager
    async def heard(self, subject: str) -> AsyncIterator[asyncio.Event]:
        """Context manager: an event that is set whenever a gateway writes a message of a wildcard subject."""
        await self._ensure()
        event = asyncio.Event()

        async def hear(_: Msg) -> None:
            event.set()

        try:
            subscription = await self._client.subscribe(subject, cb=hear)
        except ERRORS as error:
            raise self._unavailable("could not follow", error) from error
        try:
            yield event
        finally:
            with contextlib.suppress(*ERRORS):
                await subscription.unsubscribe()

    async def count(self, subject: str) -> int:
        """Number of messages of a wildcard subject."""
        page = await self._read(subject, after=0, limit=1)
        return 1 + page[0].pending if page else 0

    async def used_bytes(self) -> int:
        """Return the bytes kept in all."""
        await self._ensure()
        try:
            return (await self._js.stream_info(self.layout.kept)).state.bytes or 0
        except ERRORS as error:
            raise self._unavailable("could not count", error) from error

    async def purge(self, subject: str, *, work: bool = False, through: int | None = None) -> None:
        """Delete the messages of a wildcard subject up to a sequence, in the work queue if `work`."""
        await self._ensure()
        stream, before = self.layout.work if work else self.layout.kept, None if through is None else through + 1
        try:
            await self._js.purge_stream(stream, subject=subject, seq=before)
        except ERRORS as error:
            raise self._unavailable("could not delete", error) from error

    async def _publish(self, subject: str, data: bytes, *, headers: dict[str, str] | None = None) -> int:
        await self._ensure()
        try:
            seq = (await self._js.publish(subject, data, headers=headers)).seq
            _heed_cancellation()
            return seq
        except nats.errors.MaxPayloadError as error:
            raise TooLargeError(f"{len(data)} bytes are more than NATS carries at a time (max_payload)") from error
        except nats.js.errors.APIError as error:
            told = error.description or ""
            if error.err_code == _WRONG_SEQUENCE or "per subject" in told:
                return 0
            if error.err_code in _FULL:
                raise self.layout.full(told) from error
            raise self._unavailable("could not write", error) from error
        except ERRORS as error:
            raise self._unavailable("could not write", error) from error

    async def _read(self, subject: str, *, after: int, limit: int) -> list[Stored]:
        """The next messages of a subject, in one request."""
        await self._ensure()
        inbox = self._client.new_inbox()
        found: list[Stored] = []
        request = {"seq": after + 1, "next_by_subj": subject, "batch": limit, "max_bytes": PAGE_BYTES}
        try:
            answers = await self._client.subscribe(inbox)
            try:
                to = f"$JS.API.DIRECT.GET.{self.layout.kept}"
                await self._client.publish(to, json.dumps(request).encode(), reply=inbox)
                while True:
                    message = await answers.next_msg(API_TIMEOUT_S)
                    _heed_cancellation()
                    headers = message.headers or {}
                    if status := headers.get("Status"):
                        if status in ("204", "404"):
                            return found
                        raise UnavailableError(f"could not read {self.layout.what}: {status}")
                    found.append(
                        Stored(
                            subject=headers["Nats-Subject"],
                            seq=int(headers["Nats-Sequence"]),
                            data=message.data,
                            pending=int(headers.get("Nats-Num-Pending", "0")),
                        )
                    )
            finally:
                await answers.unsubscribe()
        except ERRORS as error:
            raise self._unavailable("could not read", error) from error

    # -- work --------------------------------------------------------------------------------------------------------

    async def enqueue(self, subject: str, data: bytes) -> bool:
        """Queue work; False: it is queued already. Raises StoreFullError."""
        return await self._publish(subject, data) > 0

    async def fetch(self, kind: str, number: int) -> list[Delivery]:
        """Up to `number` deliveries (see `Layout.kinds`) as soon as there is one; [] after a timeout.

        Don't cancel it: what an abandoned pull brings comes again only after `ACK_WAIT_S`.
        """
        try:
            await self._ensure()
            messages = await self._pulls[kind].fetch(number, timeout=PULL_S)
        except TimeoutError:
            self._told = False
            return []
        except (*ERRORS, ServingError) as error:
            if not isinstance(error, UnavailableError):
                self._is_open = False  # the consumer may be gone: check it
            if not self._told:  # once, until it works again
                self._log.warning(f"{self.layout.what}.no_work", extra={"error": text_of(error)})
            self._told = True
            await asyncio.sleep(RETRY_PAUSE_S)
            return []
        self._told = False
        deliveries = [Delivery(message, self._held.discard) for message in messages]
        self._held.update(deliveries)
        _heed_cancellation()
        return deliveries

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for delivery in list(self._held):
                try:
                    await delivery.beat()
                except Exception:  # the others must not be lost
                    self._log.exception(f"{self.layout.what}.beat_failed")

    # -- connection --------------------------------------------------------------------------------------------------

    async def _ensure(self) -> None:
        """Create missing streams and consumers. Raises UnavailableError."""
        if not self._client.is_connected:  # the client would buffer what is sent
            raise UnavailableError("not connected to NATS")
        if self._is_open:
            return
        async with self._opening:
            if self._is_open:
                return
            if self._failed and time.monotonic() < self._failed_at + OPEN_AGAIN_S:
                raise UnavailableError(self._failed)  # other waiters must not time out one by one
            try:
                await self._make_streams()
                for kind in self.layout.kinds:
                    await self._make_consumer(kind)
            except ERRORS as error:
                self._failed, self._failed_at = f"{self.layout.what} are not ready: {text_of(error)}", time.monotonic()
                raise UnavailableError(self._failed) from error
            self._is_open, self._failed = True, ""

    async def _make_streams(self) -> None:
        for config in self.layout.streams():
            try:
                await add_stream(self._js, config)
            except nats.js.errors.BadRequestError:  # it exists with another configuration
                await self._js.update_stream(config)

    async def _make_consumer(self, kind: str) -> None:
        config = ConsumerConfig(
            name=kind,
            durable_name=kind,
            filter_subject=f"{self.layout.work_root}.{kind}.>",
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=-1,
            max_ack_pending=-1,  # delayed messages count, too; the queue itself is bounded
        )
        await self._js.add_consumer(self.layout.work, config)
        if kind not in self._pulls:
            self._pulls[kind] = await self._js.pull_subscribe_bind(kind, stream=self.layout.work)

    async def _on_return(self) -> None:
        self._is_open, self._failed = False, ""

    async def _on_error(self, error: Exception) -> None:
        self._log.debug(f"{self.layout.what}.connection", extra={"error": text_of(error)})

    def _unavailable(self, what: str, error: BaseException) -> UnavailableError:
        self._is_open = False  # a restarted server may lack our streams
        return UnavailableError(f"{what} {self.layout.what}: {text_of(error)}")


def _heed_cancellation() -> None:
    """Raise CancelledError in a cancelled task: Python 3.11's `wait_for` loses it when a result arrives as well."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
