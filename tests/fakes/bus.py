"""`common.bus.Bus` within one process: messages are encoded and decoded as on the wire, and arrive at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import msgspec

from common.errors import NobodyListensError, ServingError, UnavailableError
from common.job_queue import JobQueue
from common.messages import Job, decode, encode
from common.messages.arrivals import contradiction

Decoder = msgspec.msgpack.Decoder[Any]
Handler = Callable[[Any], Awaitable[msgspec.Struct | None]]


class MemoryBus:
    """Delivers to whoever listens.

    `deaf` subjects get requests and answer none in time. `refusals` are raised by the next calls of `publish_job`, one each;
    with `loses_answers` the job of such a call is queued all the same.
    """

    malformed = dead_letters = 0

    def __init__(self) -> None:
        self.forged = 0
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
            if _covers(pattern, subject) and (heard := self._take(subject, decoder, message)) is not None:
                handler(heard)
        served = self._served(subject)
        if served is not None and (heard := self._take(subject, served[0], message)) is not None:
            await served[1](heard)

    def refuse(self, subject: str, why: str) -> None:
        self.forged += 1

    def _take(self, subject: str, decoder: Decoder, message: msgspec.Struct) -> Any:
        heard = decode(decoder, encode(message))
        if contradiction(subject, heard):
            self.forged += 1
            return None
        return heard

    def _served(self, subject: str) -> tuple[Decoder, Handler] | None:
        return next((server for pattern, server in self._servers.items() if _covers(pattern, subject)), None)

    async def flush(self, timeout_s: float) -> None:
        """Nothing is ever on its way."""

    async def request(self, subject: str, message: msgspec.Struct, decoder: Decoder, *, timeout_s: float) -> Any:
        if not self.connected:
            raise UnavailableError("not connected")
        served = self._served(subject)
        if served is None:
            raise NobodyListensError(f"nobody listens on {subject}")
        heard = self._take(subject, served[0], message)
        answer = None if heard is None else await served[1](heard)
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


def _covers(pattern: str, subject: str) -> bool:
    return pattern == subject or (pattern.endswith(".*") and subject.rpartition(".")[0] == pattern[:-2])


class MemorySubscription:
    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end

    async def close(self) -> None:
        self._end()
