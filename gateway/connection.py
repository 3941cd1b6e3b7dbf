"""One HTTP connection: uvicorn's, with bounds on what comes before there is a request to look at.

Neither its parser nor uvicorn limits the head of a request, and a connection that never completes one is kept for ever. Here a
head has a size and a time, or it is answered with 431 or 408 and closed. What comes later is bounded where it is read.

Beyond a number of open connections a new one is answered with 503 and closed, before anything is read from it: each costs a
descriptor and memory, also when nothing is asked on it.

A client that does not read its answer makes the answer wait once 64 KiB are buffered for it; after a while it is cut off, which
cancels the work behind the answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from typing import Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.responses import error_body

log = logging.getLogger("baton.http")

MAX_HEAD_BYTES = 64 << 10  # request line and headers
HEAD_TIMEOUT_S = 20.0  # from the first byte of a request, or from the connection's beginning
UNREAD_TIMEOUT_S = 30.0  # a full buffer in which the client made no room
MAX_CONNECTIONS = 4096
MAX_LEAVING = 128  # connections that were refused and may still read why; more are cut off without a word
LEAVE_S = 1.0  # that long each
RETRY_AFTER_S = 1
_AT_ONCE = struct.pack("ii", 1, 0)  # lingers no second


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
        if taken is not None:  # what the kernel holds for it goes as well, instead of waiting for the client
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()  # closing would wait for the client

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # what was on its way when the connection was closed
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
        self.scope["baton.received_at"] = time.monotonic()  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._note_time()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._note_time()
        super().on_message_complete()

    def _note_time(self) -> None:
        """When the newest byte of the request was read: `gateway.app` says how long a refusal took from there."""
        self.scope["baton.read_at"] = time.monotonic()  # type: ignore[typeddict-unknown-key]

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
        """Say so and close, a little later: closing on a request that is on its way would reset the answer as well."""
        self.connections.discard(self)  # it takes nobody's place
        self._refused = True
        if not self._leaving:  # once for a crowd
            log.warning("http.too_many_connections", extra={"open": len(self.connections)})
        if len(self._leaving) >= self.max_leaving:
            self.transport.abort()
            return
        self._leaving.add(self)
        message = f"{self.max_connections} connections are open, as many as may be: try again later, or elsewhere"
        self._answer(503, error_body(message, kind="service_unavailable_error", code="too_many_connections"))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LEAVE_S, self.transport.close)

    def _refuse(self, status: int, message: str) -> None:
        self._refused = True
        self._stop_timer()
        if self.transport.is_closing():
            return
        self._answer(status, error_body(message, kind="invalid_request_error"))
        self.transport.close()

    def _answer(self, status: int, error: dict[str, Any]) -> None:
        body = msgspec.json.encode(error)
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        head += f"retry-after: {RETRY_AFTER_S}\r\n" if status == 503 else ""
        self.transport.write(STATUS_LINE[status] + head.encode() + b"\r\n" + body)


def bounded_to(max_connections: int) -> type[BoundedProtocol]:
    """`BoundedProtocol` for a gateway that keeps so many connections open at most."""

    class Bounded(BoundedProtocol):
        pass

    Bounded.max_connections = max_connections
    return Bounded
