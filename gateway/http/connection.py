"""uvicorn's HTTP connection, with bounds on what comes before there is a request.

uvicorn limits neither the size nor the time of a request's head. Here a head too large or too slow is answered with 431 or 408,
and the connection closed. Bodies are bounded where they are read.

Beyond a number of open connections, a new one gets a 503 and is closed unread: each costs a descriptor and memory.

An answer whose client does not read waits once 64 KiB are buffered. After a while the client is cut off, which cancels the work.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from typing import Any, ClassVar, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.http.problem import Problem, error_object
from gateway.http.request_scope import RequestScope, request_scope

log = logging.getLogger("baton.http")

MAX_HEAD_BYTES = 64 << 10  # request line and headers
HEAD_TIMEOUT_S = 20.0  # from a request's first byte, or the connection's beginning
UNREAD_TIMEOUT_S = 30.0  # a client with a full buffer reads nothing for this long
MAX_CONNECTIONS = 4096
MAX_LEAVING = 128  # refused connections that may still read why
LEAVE_TIMEOUT_S = 1.0  # then a refused connection is closed
RETRY_AFTER_S = 1
_NO_LINGER = struct.pack("ii", 1, 0)


class BoundedProtocol(HttpToolsProtocol):
    """Counts connections; counts and times the heads of requests."""

    head_timeout_s = HEAD_TIMEOUT_S
    unread_timeout_s = UNREAD_TIMEOUT_S
    max_connections = MAX_CONNECTIONS
    max_leaving = MAX_LEAVING
    _leaving: ClassVar[set[BoundedProtocol]] = set()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._head_bytes = 0
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._turn_away()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leaving.discard(self)
        self._stop_timer()
        self._is_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_read()
        self._unread = self.loop.call_later(self.unread_timeout_s, self._cut_off)

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _cut_off(self) -> None:
        log.warning("http.client_does_not_read", extra={"for_s": self.unread_timeout_s})
        taken = self.transport.get_extra_info("socket")
        if taken is not None:  # the kernel drops what it holds, too
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()  # closing would wait for the client

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # bytes that came after the connection was closed
        began_in_head = self._in_head
        if began_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if began_in_head and self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        self._state().received_at = time.monotonic()
        super().on_headers_complete()
        self._state().read_at = time.monotonic()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._state().read_at = time.monotonic()
        super().on_message_complete()

    def _state(self) -> RequestScope:
        return request_scope(cast(dict[str, Any], self.scope))

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._refuse(408, f"no complete request within {self.head_timeout_s:g} s")

    def _turn_away(self) -> None:
        """Answer, and close a little later: closing while a request arrives would reset the answer as well."""
        self.connections.discard(self)  # it does not count
        self._refused = True
        if not self._leaving:  # logged once for a crowd
            log.warning("http.too_many_connections", extra={"open": len(self.connections)})
        if len(self._leaving) >= self.max_leaving:
            self.transport.abort()
            return
        self._leaving.add(self)
        message = f"{self.max_connections} connections are open, as many as may be: try again later, or elsewhere"
        self._answer(Problem(status=503, message=message, code="too_many_connections"))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LEAVE_TIMEOUT_S, self.transport.close)

    def _refuse(self, status: int, message: str) -> None:
        self._refused = True
        self._stop_timer()
        if self.transport.is_closing():
            return
        self._answer(Problem(status=status, message=message))
        self.transport.close()

    def _answer(self, problem: Problem) -> None:
        """Without a path there is no dialect's form."""
        body = msgspec.json.encode(error_object(problem))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        head += f"retry-after: {RETRY_AFTER_S}\r\n" if problem.status == 503 else ""
        self.transport.write(STATUS_LINE[problem.status] + head.encode() + b"\r\n" + body)


def bounded_to(max_connections: int) -> type[BoundedProtocol]:
    """`BoundedProtocol` for a gateway with a number of connections at most."""

    class Bounded(BoundedProtocol):
        pass

    Bounded.max_connections = max_connections
    return Bounded
