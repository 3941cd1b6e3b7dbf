"""One request and its answer on a connection: the gateway's facts about it, and uvicorn's cycle with what that leaves out.

A client that closed its side only and one that is gone send the same FIN. A closed socket answers further bytes with a reset,
which the kernel notes as the socket's error. So a client of HTTP/1.1 whose answer has not begun gets one `100 Continue`, one of
HTTP/1.0 the first bytes of its answer, and one in the middle of a stream an event that says nothing.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import httptools
from fastapi import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from common.tracing import Attributes, Value
from gateway.tenants.tenants import ANYBODY, Tenant

_KEY = "baton"
_FIELDS = "baton.fields"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
COMMENT = b":\n\n"  # a comment, which server-sent events ignore
BEGINNING = b"HTTP/1.1 "  # uvicorn's status lines begin so, also for HTTP/1.0
LOOK_EVERY_S = 0.1
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"

WATCH_AFTER_S = 0.02  # most answers have started by then
CLIENT_LEFT = 499  # nobody reads this answer
LEFT = "client disconnected"
T = TypeVar("T")


class ClientLeftError(Exception):
    """The client disconnected before its answer started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The names for the span of a generating request."""

    name: str
    operation: str  # as GenAI's semantic conventions name it
    attributes: Attributes
    status: str  # the attribute of the answer's status


@dataclass(slots=True, eq=False)
class RequestTrace:
    """The open span around a request, completed by the endpoint."""

    context: str = ""  # W3C `traceparent`; the client's if no span is recorded
    parent: str = ""
    began_at: float = 0.0
    is_recorded: bool = False
    status: int = 0
    error: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)
    answered: Callable[[], Mapping[str, Value]] | None = None  # attributes of the answer, once it has ended


class BodyWriter(Protocol):
    """Writes an answer's body synchronously, once its head is sent."""

    idle_event: bytes  # may be written between any two parts; empty: nothing may

    def take_body(self) -> bytes | None:
        """The request's body, if it arrived completely and was not taken."""
        ...

    def hold_head(self) -> None:
        """Hold the answer's head until the first part of its body, which follows at once."""
        ...

    @property
    def is_read(self) -> bool:
        """True if the client keeps up; otherwise writes are buffered."""
        ...

    async def read(self) -> None:
        """Return once the client has read the buffer, or left."""
        ...

    def write(self, data: bytes) -> None:
        """Write the next part."""
        ...

    def end(self, data: bytes) -> None:
        """Write the last part."""
        ...


@dataclass(slots=True, eq=False)
class RequestScope:
    """Instants are `time.monotonic()`."""

    received_at: float = field(default_factory=time.monotonic)  # when the head was complete
    read_at: float = field(default_factory=time.monotonic)  # when the newest byte was read
    request_id: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)  # its headers, by their names in lower case
    tenant: Tenant = ANYBODY
    session: str = ""  # `x-session-id`
    trace: RequestTrace = field(default_factory=RequestTrace)
    status: int = 0  # the answer's; 0: not started
    problem: int = 0  # a client's: status before the dialect's mapping; 0: none
    waited: bool = False  # refused after waiting
    headers: Mapping[str, str] = field(default_factory=dict)  # added to any answer
    writer: BodyWriter | None = None  # the connection's


def request_scope(scope: MutableMapping[str, Any]) -> RequestScope:
    """The value in `scope`, created on first use."""
    state: RequestScope | None = scope.get(_KEY)
    if state is None:
        state = scope[_KEY] = RequestScope()
    return state


def fields_of(scope: MutableMapping[str, Any]) -> Mapping[str, str]:
    """The request's headers by lower-case name, parsed once; the first one of duplicates."""
    fields: Mapping[str, str] | None = scope.get(_FIELDS)
    if fields is None:
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        scope[_FIELDS] = fields
    return fields


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's id for a request, or a new one."""
    asked = headers.get("x-request-id", "")
    return asked if _REQUEST_ID.match(asked) else secrets.token_hex(16)


class _Begun:
    """A transport on which the start of an answer was written already."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._left = BEGINNING

    def write(self, data: bytes) -> None:
        left, self._left = self._left, b""
        self._transport.write(data.removeprefix(left))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Kept:
    """A stand-in for a transport that buffers writes."""

    data = b""

    def write(self, data: bytes) -> None:
        self.data += data


class Exchange(RequestResponseCycle):
    """The cycle. HTTP/1.0 has no chunks: there, an answer without a length ends with the connection.

    A client that waits for `100 Continue` and is refused may send its next request in place of the body: that connection closes.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        request_scope(cast(dict[str, Any], self.scope)).writer = self
        self._has_no_length = False
        self.idle_event = b""  # may be written between any two parts
        self._holds_head = False
        self._head = b""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if self.waiting_for_100_continue and self.more_body:
                self.keep_alive = False
            lengths = [value for name, value in message.get("headers", []) if name == b"content-length"]
            if self.scope["http_version"] == "1.0" and not lengths:
                self._has_no_length, self.chunked_encoding = True, False
            kinds = [value for name, value in message.get("headers", []) if name == b"content-type"]
            if not lengths and not self.idle_event and any(kind.startswith(b"text/event-stream") for kind in kinds):
                self.idle_event = COMMENT
            if self._holds_head:
                await self._send_later(message)
                return
        elif self._has_no_length:
            self.expected_content_length = len(message.get("body", b""))  # each part is as long as it is
        await super().send(message)

    async def _send_later(self, head: Any) -> None:
        transport, kept = self.transport, _Kept()
        self.transport = cast(asyncio.Transport, kept)
        try:
            await super().send(head)
        finally:
            self.transport, self._head = transport, kept.data

    def take_body(self) -> bytes | None:
        if self.more_body or self.disconnected or self.waiting_for_100_continue:
            return None
        self.flow.resume_reading()  # a long body paused it
        self.message_event.clear()
        body, self.body = bytes(self.body), bytearray()
        return body

    # -- a body that is written without waiting ------------------------------------------------------------------------

    def hold_head(self) -> None:
        self._holds_head = True

    @property
    def is_read(self) -> bool:
        return not self.flow.write_paused

    async def read(self) -> None:
        await self.flow.drain()

    def write(self, data: bytes) -> None:
        if self.disconnected:
            return
        if data and self.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.transport.write(data)

    def end(self, data: bytes) -> None:
        if self.disconnected:
            return
        if self.chunked_encoding:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self.transport.write(self._head + data)
        self._head = b""
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    # -- what uvicorn leaves out ---------------------------------------------------------------------------------------

    def begin_status_line(self) -> None:
        """Write the bytes common to all answers, before the status is known. HTTP/1.0 has no `100 Continue` to probe with."""
        if not self.waiting_for_100_continue:
            self.transport.write(BEGINNING)
            self.transport = cast(asyncio.Transport, _Begun(self.transport))

    def give_up(self) -> None:
        """Tell the application that its client left, and write nothing more."""
        self.disconnected = True
        self.message_event.set()


def path_and_query(url: bytes) -> tuple[bytes, bytes]:
    """Split the target of a request line. An absolute URL, meant for a proxy, is accepted without its scheme and host.

    Raises ValueError or HttpParserInvalidURLError.
    """
    if url.startswith(b"/"):  # the parser would take the start of `//a/b` for a host
        path, _, query = url.partition(b"?")
        return path, query
    parsed = httptools.parse_url(url)
    if parsed.path is None:
        raise ValueError("no path")
    return parsed.path, parsed.query or b""


class Reach:
    """Aborts the connection when its client turns out to be gone. `due`: the exchange whose answer is pending."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, due: Callable[[], Exchange | None]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._due = due
        self._probed: Exchange | None = None
        self._timer = loop.call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Stop the keep-alive timer."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        taken = self._transport.get_extra_info("socket")
        if taken is None or taken.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        exchange = self._due()
        if exchange is not None and exchange is not self._probed:
            self._probed = exchange
            if not exchange.response_started:
                if exchange.scope["http_version"] == "1.0":
                    exchange.begin_status_line()
                else:
                    self._transport.write(PROBE)
            elif exchange.idle_event and not exchange.response_complete:
                exchange.write(exchange.idle_event)
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)


async def disconnected(request: Request) -> None:
    """Return when the client disconnected. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, start: Coroutine[Any, Any, T]) -> T:
    """Start an answer, possibly after a wait. Raises ClientLeftError if the client disconnected meanwhile."""
    asking, gone, is_gone = asyncio.current_task(), list[asyncio.Task[None]](), False
    assert asking is not None

    def look() -> None:
        gone.append(asyncio.create_task(disconnected(request)))
        gone[0].add_done_callback(leave)

    def leave(_: object) -> None:
        nonlocal is_gone
        if waits:
            is_gone = True
            asking.cancel(LEFT)

    waits = True
    timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, look)
    try:
        return await start
    except asyncio.CancelledError:
        if not is_gone or asking.uncancel():
            raise
        raise ClientLeftError from None
    finally:
        waits = False
        timer.cancel()
        for task in gone:
            task.cancel()
