"""`common.bus.Bus` within one process: messages are encoded and decoded as on the wire, and arrive at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import msgspec

from common.errors import NobodyListensError, ServingError, UnavailableError
from common.job_queue import JobQueue
from common.messages import Job, decode, encode

Decoder = msgspec.msgpack.Decoder[Any]
Handler = Callable[[Any], Awaitable[msgspec.Struct | None]]


class MemoryBus:
    """Delivers to whoever listens.

    `deaf` subjects get requests and answer none in time. `refusals` are raised by the next calls of `publish_job`, one each;
    with `loses_answers` the job of such a call is queued all the same.
    """

    malformed = dead_letters = 0

    def __init__(self) -> None:
        self.connected = True
        self.reconnects = 0
        self.published: list[tuple[str, msgspec.Struct]] = []
        self.queued: dict[int, tuple[str, Job]] = {}
        self.buried: list[tuple[str, Job, str]] = []
        self.deaf: set[str] = set()
        self.refusals: list[ServingError] = []
        self.loses_answers = False
        self._servers: dict[str, tuple[Decoder, Handler]] = {}
        self._listeners: list[tuple[str, Decoder, Callable[[Any], None]]] = []
        self._numbers = count(1)
        self._seen: dict[tuple[str, int], int] = {}

    async def publish(self, subject: str, message: msgspec.Struct) -> None:
        self.published.append((subject, message))
        for pattern, decoder, handler in self._listeners:
            if pattern == subject or (pattern.endswith(".*") and subject.startswith(pattern[:-1])):
                handler(decode(decoder, encode(message)))
        if subject in self._servers:
            server_decoder, server = self._servers[subject]
            await server(decode(server_decoder, encode(message)))

    async def flush(self, timeout_s: float) -> None:
        """Nothing is ever on its way."""

    async def request(self, subject: str, message: msgspec.Struct, decoder: Decoder, *, timeout_s: float) -> Any:
        if not self.connected:
            raise UnavailableError("not connected")
        if subject not in self._servers:
            raise NobodyListensError(f"nobody listens on {subject}")
        own_decoder, handler = self._servers[subject]
        answer = await handler(decode(own_decoder, encode(message)))
        if subject in self.deaf or answer is None:
            raise UnavailableError(f"no answer on {subject}")
        return decode(decoder, encode(answer))

    async def serve(self, subject: str, decoder: Decoder, handler: Handler) -> MemorySubscription:
        self._servers[subject] = (decoder, handler)
        return MemorySubscription(lambda: self._servers.pop(subject, None))

    async def subscribe(self, subject: str, decoder: Decoder, handler: Callable[[Any], None]) -> MemorySubscription:
        entry = (subject, decoder, handler)
        self._listeners.append(entry)
        return MemorySubscription(lambda: self._listeners.remove(entry))

    async def publish_job(self, worker: str, job: Job) -> int:
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None and not self.loses_answers:
            raise refusal
        name = (job.request_id, job.attempt)  # the same attempt is stored once
        if name not in self._seen:
            self._seen[name] = next(self._numbers)
            self.queued[self._seen[name]] = (worker, job)
        if refusal is not None:
            raise refusal
        return self._seen[name]

    async def delete_job(self, stream_seq: int, job: Job) -> None:
        self.queued.pop(stream_seq, None)

    async def bury_job(self, worker: str, job: Job, *, reason: str) -> None:
        self.buried.append((worker, job, reason))

    async def has_job(self, stream_seq: int) -> bool:
        return stream_seq in self.queued

    async def jobs(self, worker: str) -> JobQueue:
        raise UnavailableError("nobody pulls jobs from this bus")

    def forget_jobs(self) -> None:
        """The server was restarted: its memory is gone."""
        self.queued.clear()
        self._seen.clear()


class MemorySubscription:
    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    async def close(self) -> None:
        self._end()
