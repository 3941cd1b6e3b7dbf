"""The responses of all tenants. Subjects carry the tenant's digest, so a tenant finds only its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from common import subjects
from common.errors import InvalidRequestError
from common.wire import Wire
from gateway.keeping.changing import changed
from gateway.keeping.layout import Layout, token_of
from gateway.keeping.streams import KeptStreams
from gateway.responses.records import (
    Content,
    Events,
    ResponseLimits,
    ResponseRecord,
    Run,
    checked_response_id,
    content_decoder,
    encode,
    events_decoder,
    no_response,
    record_decoder,
)
from gateway.responses.rooms import Rooms

PART_BYTES = 512 << 10
SHORT_BYTES = 64 << 10  # encoded and decoded on the event loop itself
CONCURRENT_CALLS = 8
FOLLOW_S = 1.0  # check the record if no event comes
Value = TypeVar("Value")


def response_streams(wire: Wire, limits: ResponseLimits) -> KeptStreams:
    """The streams of responses and conversations, and the work queue of background responses."""
    layout = Layout(
        what="responses",
        kept=subjects.RESPONSES_STREAM,
        work=subjects.RESPONSES_WORK_STREAM,
        kinds=("run",),
        store_bytes=limits.store_bytes,
        keep_s=limits.keep_s,
        remedy="delete conversations, sessions or responses",
    )
    return KeptStreams(wire, layout)


async def off_loop(num_bytes: int, make: Callable[..., Value], *arguments: Any) -> Value:
    """Return the result of `make`, run in a thread if it handles many bytes."""
    return make(*arguments) if num_bytes <= SHORT_BYTES else await asyncio.to_thread(make, *arguments)


async def gathered(calls: Sequence[Callable[[], Awaitable[Value]]]) -> list[Value]:
    """All results in order, with a few concurrent calls."""
    found: list[Value] = []
    for start in range(0, len(calls), CONCURRENT_CALLS):
        found += await asyncio.gather(*(call() for call in calls[start : start + CONCURRENT_CALLS]))
    return found


class ResponseStore:
    """The store of responses. Every call raises UnavailableError if NATS can't do it now."""

    def __init__(self, streams: KeptStreams, limits: ResponseLimits) -> None:
        self.streams = streams
        self.limits = limits
        self.rooms = Rooms(streams, limits)
        self.leaving = asyncio.Event()

    async def keep(self, record: ResponseRecord, content: Content) -> ResponseRecord:
        """Store a new response, acknowledged on return. Raises StoreFullError, OverloadedError, InvalidRequestError.

        One that isn't over is made in the background by whichever gateway takes it.
        """
        parts, record = await self._cut(record, content)
        await self.rooms.for_response(record)
        await self._write(record, parts)
        if not record.is_over:
            # The work is queued first: without a response it is dropped, but a response without work would wait forever.
            run = Run(response=record.id, tenant=record.tenant, created_at=record.created_at)
            await self.streams.enqueue(subjects.response_run(token_of(record.tenant), record.id), encode(run))
        await self.streams.create(record.subject, encode(record))
        return record

    async def end(self, record: ResponseRecord, content: Content) -> bool:
        """Store the result and status of a started response. False: it was ended, or restarted, elsewhere meanwhile."""
        starts = record.starts
        parts, record = await self._cut(msgspec.structs.replace(record, content=starts), content)
        await self._write(record, parts)

        def ended(now: ResponseRecord) -> ResponseRecord:
            if now.is_over or now.starts != starts:
                return now
            return record

        return await self.change(record.tenant, record.id, ended) == record

    async def load(self, tenant: str, response_id: str) -> tuple[ResponseRecord, int]:
        """A tenant's response, and its sequence for `KeptStreams.replace`. Raises NotKeptError."""
        subject = subjects.kept_response(token_of(tenant), checked_response_id(response_id), "record")
        stored = await self.streams.get(subject)
        if stored is None:
            raise no_response(response_id)
        return record_decoder.decode(stored.data), stored.seq

    async def record(self, tenant: str, response_id: str) -> ResponseRecord:
        """Raises NotKeptError."""
        return (await self.load(tenant, response_id))[0]

    async def content(self, record: ResponseRecord) -> Content:
        """Raises NotKeptError."""
        parts = await gathered([partial(self._part, record, number) for number in range(record.parts)])
        return await off_loop(record.bytes, content_decoder.decode, b"".join(parts))

    async def whole(self, tenant: str, response_id: str) -> tuple[ResponseRecord, Content]:
        """Raises NotKeptError."""
        record = await self.record(tenant, response_id)
        return record, await self.content(record)

    async def history(self, tenant: str, response_ids: Sequence[str]) -> list[Content]:
        """Contents of responses, in order. Raises NotKeptError, which names the missing one."""
        return await self.contents(await gathered([partial(self.record, tenant, one) for one in response_ids]))

    async def contents(self, records: Sequence[ResponseRecord]) -> list[Content]:
        """Raises NotKeptError."""
        return await gathered([partial(self.content, record) for record in records])

    async def change(
        self, tenant: str, response_id: str, to: Callable[[ResponseRecord], ResponseRecord]
    ) -> ResponseRecord:
        """Apply `to` to the newest record, retrying on conflicts. Raises what `to` raises, NotKeptError."""
        return await changed(
            f"response {response_id}",
            partial(self.load, tenant, response_id),
            to,
            lambda record, seq: self.streams.replace(record.subject, encode(record), seq=seq),
        )

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises NotKeptError."""
        await self.drop(await self.record(tenant, response_id))
        self.rooms.forget(tenant)

    async def drop(self, record: ResponseRecord) -> None:
        """Delete all parts of a response."""
        await self.streams.purge(subjects.kept_response(token_of(record.tenant), record.id, ">"))

    # -- events --------------------------------------------------------------------------------------------------------

    async def add_events(self, record: ResponseRecord, number: int, events: Events) -> bool:
        """Store a run of events, numbered from 0. False: another gateway wrote it."""
        subject, data = subjects.kept_response(token_of(record.tenant), record.id, "events", number), encode(events)
        if await self.streams.create(subject, data):
            return True
        there = await self.streams.get(subject)  # our own write, if only its acknowledgement was lost
        return there is not None and there.data == data

    async def has_events(self, record: ResponseRecord, number: int) -> bool:
        """True if this run of events is stored."""
        subject = subjects.kept_response(token_of(record.tenant), record.id, "events", number)
        return await self.streams.get(subject) is not None

    async def follow(self, record: ResponseRecord) -> AsyncGenerator[Events | ResponseRecord, None]:
        """A response's runs of events as they are stored, up to the last one; its record if it ended without one.

        Nothing more comes when this gateway is `leaving`: another one goes on with it.
        """
        subject, seq = subjects.kept_response(token_of(record.tenant), record.id, "events", "*"), 0
        async with self.streams.heard(subject) as heard:
            while not self.leaving.is_set():
                was_over = record.is_over
                heard.clear()
                async for stored in self.streams.scan(subject, after=seq):
                    seq, events = stored.seq, events_decoder.decode(stored.data)
                    yield events
                    if events.is_last:
                        return
                if was_over:
                    yield record
                    return
                try:
                    async with asyncio.timeout(FOLLOW_S):
                        await heard.wait()
                except TimeoutError:
                    record = await self.record(record.tenant, record.id)

    # -- parts ---------------------------------------------------------------------------------------------------------

    async def _cut(self, record: ResponseRecord, content: Content) -> tuple[list[bytes], ResponseRecord]:
        size = len(content.input) + len(content.object) + len(content.body)
        if size > self.limits.content_bytes:
            raise InvalidRequestError(
                f"the response has {size} bytes, more than {self.limits.content_bytes} that are kept: set store to false",
                param="store",
            )
        data = await off_loop(size, encode, content)
        parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
        return parts, msgspec.structs.replace(record, bytes=record.bytes + len(data), parts=len(parts))

    async def _write(self, record: ResponseRecord, parts: list[bytes]) -> None:
        await gathered(
            [partial(self.streams.create, _part_of(record, number), part) for number, part in enumerate(parts)]
        )

    async def _part(self, record: ResponseRecord, number: int) -> bytes:
        stored = await self.streams.get(_part_of(record, number))
        if stored is None:
            raise no_response(record.id)
        return stored.data


def _part_of(record: ResponseRecord, number: int) -> str:
    return subjects.kept_response(token_of(record.tenant), record.id, "content", record.content, number)
