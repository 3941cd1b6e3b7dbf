"""Pipelined calls of Redis functions on one connection. Calls of one event-loop turn are one write.

redis-py connects, with its login, TLS and addresses; its layers of pool, retries and parser cost more than a short call.
Answers come in the order of the calls: one that nobody waits for any more is read and dropped, and no other call gets it.
A connection that owes an answer for too long is cut off, and so is one to a server that does not want to serve: the next call
looks up the address anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

from common.log import difference

log = logging.getLogger("baton.store")

MAX_ANSWER_BYTES = 4 << 20
MAX_UNANSWERED_BYTES = 32 << 20
MAX_DEPTH = 4  # nested arrays
MOVED = ("READONLY", "LOADING", "MASTERDOWN")  # another server has this address by now, or will
OVERRIDDEN = ("_reader", "_writer")
LOST = "speed: each call takes a connection of the pool; a server that became a replica is asked until it cuts the connection"


class PartError(Exception):
    """The reply is incomplete."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that awaits its reply."""

    answer: asyncio.Future[Any]
    give_up_at: float
    asked_at: float
    num_bytes: int


class Link:
    """A connection opened on first use. Safe for concurrent use."""

    def __init__(self, client: Redis, new_connection: Callable[[], AbstractConnection], *, timeout_s: float) -> None:
        self._client = client  # the fallback where redis-py lacks the overridden parts
        self._new_connection = new_connection
        self._lacks = [f"AbstractConnection.{name}" for name in OVERRIDDEN if not hasattr(new_connection(), name)]
        if self._lacks:
            log.warning("store.library_differs", extra=difference("redis", self._lacks, LOST))
        self._timeout_s = timeout_s  # limit for connecting, and for a reply
        self._stream: _Stream | None = None
        self._connecting: asyncio.Task[_Stream] | None = None

    async def fcall(self, function: str, arguments: Sequence[Any], *, timeout_s: float) -> Any:
        """Call a function and return its reply. Raises redis-py's errors, OSError, and TimeoutError after `timeout_s`."""
        if self._lacks:
            return await self._pooled(function, arguments, timeout_s)
        command = encoded((b"FCALL", function, b"0", *arguments))
        give_up_at = asyncio.get_running_loop().time() + timeout_s
        stream = self._stream
        if stream is not None and not stream.is_lost:
            try:
                return await stream.ask(command, give_up_at)
            except redis.exceptions.ConnectionError:
                pass  # a restart closed it; every function may be called twice
        async with asyncio.timeout_at(give_up_at):
            stream = await self._connected()
        return await stream.ask(command, give_up_at)

    async def _pooled(self, function: str, arguments: Sequence[Any], timeout_s: float) -> Any:
        words = [word for given in arguments for word in (given if isinstance(given, list) else (given,))]
        async with asyncio.timeout(timeout_s):
            said = [word if isinstance(word, bytes) else str(word).encode() for word in words]
            return await self._client.fcall(function, 0, *said)

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._stream is not None:
            self._stream.cut("this process leaves")

    async def _connected(self) -> _Stream:
        """Connect once for all waiting callers."""
        if self._stream is not None and not self._stream.is_lost:
            return self._stream
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Stream:
        connection = self._new_connection()
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()
        except BaseException:
            with contextlib.suppress(Exception):
                await connection.disconnect(nowait=True)
            raise
        self._stream = _Stream(connection, timeout_s=self._timeout_s)
        return self._stream


class _Stream(asyncio.Protocol):
    """The protocol of the connection: commands out, replies in."""

    def __init__(self, connection: Any, *, timeout_s: float) -> None:
        self._connection = connection  # a connection closes its socket when it is garbage-collected
        self._transport: asyncio.Transport = connection._writer.transport
        self._transport.set_protocol(self)
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._due: deque[_Call] = deque()
        self._out: list[bytes] = []
        self._in = b""
        self._num_bytes = 0  # bytes not answered yet
        self._timer: asyncio.TimerHandle | None = None  # one for all calls
        self.is_lost = False

    async def ask(self, command: bytes, give_up_at: float) -> Any:
        if self.is_lost:  # lost since it was connected
            raise redis.exceptions.ConnectionError("Redis closed the connection at once")
        if self._num_bytes + len(command) > MAX_UNANSWERED_BYTES:
            raise TimeoutError("too many calls wait for their answers")
        call = _Call(self._loop.create_future(), give_up_at, self._loop.time(), len(command))
        self._due.append(call)
        self._num_bytes += len(command)
        if not self._out:
            self._loop.call_soon(self._write)
        self._out.append(command)
        if self._timer is None or call.give_up_at < self._timer.when():
            self._look_at(call.give_up_at)
        return await call.answer

    def _write(self) -> None:
        out, self._out = self._out, []
        if not self.is_lost:
            self._transport.write(b"".join(out))

    # -- answers -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        data, at = self._in + data if self._in else data, 0
        try:
            while at < len(data):
                answer, at = decoded(data, at)
                self._answered(answer)
        except PartError:
            pass
        except ValueError as error:
            self.cut(f"Redis speaks nonsense: {error}")
            return
        self._in = data[at:]
        if len(self._in) > MAX_ANSWER_BYTES:
            self.cut("an answer is too long")

    def _answered(self, answer: Any) -> None:
        if not self._due:
            raise ValueError("an answer that nobody asked for")
        call = self._due.popleft()
        self._num_bytes -= call.num_bytes
        is_error = isinstance(answer, redis.exceptions.ResponseError)
        tell = call.answer.set_exception if is_error else call.answer.set_result
        if not call.answer.done():  # otherwise it timed out or its caller was cancelled
            tell(answer)
        if is_error and str(answer).startswith(MOVED):
            self.cut(str(answer))

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _look_at(self, instant: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(instant, self._look)

    def _look(self) -> None:
        """Time out overdue calls; schedule the check of the next one."""
        self._timer, now = None, self._loop.time()
        if self._due and now - self._due[0].asked_at >= self._timeout_s:
            self.cut("Redis does not answer")
            return
        next_at = self._due[0].asked_at + self._timeout_s if self._due else None
        for call in self._due:
            if call.answer.done():
                continue
            if call.give_up_at <= now:
                call.answer.set_exception(TimeoutError())
            elif next_at is None or call.give_up_at < next_at:
                next_at = call.give_up_at
        if next_at is not None:
            self._look_at(next_at)

    def connection_lost(self, error: Exception | None) -> None:
        self.cut(str(error or "Redis closed the connection"))

    def cut(self, why: str) -> None:
        """Close: nothing more is sent or received on this connection."""
        self.is_lost = True
        self._transport.abort()
        self._connection._writer = self._connection._reader = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due:
            call, now = self._due.popleft(), self._loop.time()
            if not call.answer.done():
                is_late = now - call.asked_at >= self._timeout_s
                call.answer.set_exception(TimeoutError() if is_late else redis.exceptions.ConnectionError(why))


def encoded(words: Sequence[Any]) -> bytes:
    """Encode a command: bytes, texts and numbers, or lists of equally long byte strings. Raises ValueError if they differ."""
    parts, count = [], len(words)
    for word in words:
        if isinstance(word, list):
            count += len(word) - 1
            if len(sizes := set(map(len, word))) > 1:
                raise ValueError("words of one length are wanted")
            for size in sizes:  # none of no words
                head = b"$%d\r\n" % size
                parts += [head, (b"\r\n" + head).join(word), b"\r\n"]
            continue
        said = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(said), said))
    return b"*%d\r\n%b" % (count, b"".join(parts))


def decoded(data: bytes, at: int, depth: int = 0) -> tuple[Any, int]:
    """Return the reply at offset `at`, and the offset after it. Raises PartError if incomplete, ValueError if malformed."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise PartError
    kind, said, at = data[at : at + 1], data[at + 1 : end], end + 2
    match kind:
        case b"+":
            return said, at
        case b"-":
            return redis.exceptions.ResponseError(said.decode(errors="replace").removeprefix("ERR ")), at
        case b":":
            return int(said), at
        case b"$":
            size = int(said)
            if size < 0:
                return None, at
            if len(data) < at + size + 2:
                raise PartError
            return data[at : at + size], at + size + 2
        case b"*" if depth < MAX_DEPTH:
            found = []
            for _ in range(int(said)):
                one, at = decoded(data, at, depth + 1)
                found.append(one)
            return found, at
    raise ValueError(f"an answer of kind {kind!r}")
