"""uvicorn's HTTP connection with limits on unparsed input, and answers in the order of requests.

uvicorn limits neither the size nor the time of a request's head, nor what follows a body. Bodies are bounded where they are read.

While an answer is due, what comes behind its request is kept unread. It is read, timed and refused when its turn has come.

Beyond a number of open connections, a new one is refused and closed unread.

An answer whose client does not read waits once 64 KiB are buffered. After a while the client is cut off, which cancels the work.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
import uuid
from typing import Any, ClassVar, NoReturn, cast
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.http.exchange import Exchange, Reach, RequestScope, path_and_query, request_scope
from gateway.http.problem import Problem, error_object

log = logging.getLogger("baton.http")

MAX_HEAD_BYTES = 64 << 10  # request line and headers
MAX_URL_BYTES = 16 << 10
MAX_FIELDS = 256  # each costs some 200 bytes, however short
MAX_AHEAD = 32  # pipelined requests read while one is answered
MAX_HELD_BYTES = 64 << 10  # beyond this, reading from the client pauses
MAX_FRAMING_BYTES = 64 << 10  # around a body: chunk sizes, extensions, trailers
FRAMING_PER_BYTE = 8  # a chunk of one byte takes five
HEAD_TIMEOUT_S = 20.0  # from a request's first byte, or the connection's start
UNREAD_TIMEOUT_S = 30.0  # limit for a client that stops reading
MAX_CONNECTIONS = 4096
MAX_LEAVING = 128  # refused connections that may still read the error
LEAVE_TIMEOUT_S = 1.0  # then a refused connection is closed
RETRY_AFTER_S = 1
UPGRADES = (b"upgrade", b"http2-settings")
VERSIONS = ("1.0", "1.1")
_NO_LINGER = struct.pack("ii", 1, 0)


class BoundedProtocol(HttpToolsProtocol):
    """Counts connections; counts and times requests; pipelines answers in order."""

    head_timeout_s = HEAD_TIMEOUT_S
    unread_timeout_s = UNREAD_TIMEOUT_S
    max_connections = MAX_CONNECTIONS
    max_leaving = MAX_LEAVING
    _leaving: ClassVar[set[BoundedProtocol]] = set()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._answering: Exchange | None = None  # the exchange whose answer is due; further ones are in `pipeline`
        self._begun = False  # part of a request was read
        self._in_head = True  # or before one
        self._head_bytes = 0
        self._framing_bytes = 0
        self._held = bytearray()  # not parsed yet
        self._refused = False  # nothing more is read
        self._problem: Problem | None = None  # the reason; sent in its turn
        self._line = b""
        self._reach: Reach | None = None  # set when the client ends its input
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    # -- the connection ------------------------------------------------------------------------------------------------

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
        if self._reach is not None:
            self._reach.close()
        if self._answering is not None:  # uvicorn notifies only the newest
            self._answering.give_up()
        self.pipeline.clear()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's input. It may still read, so pending answers are sent."""
        if self._answering is None or self._answering.disconnected or self.scheme == "https":
            return False
        if not self._held and self._is_cut_short():
            return False
        if self._reach is None:
            if not self.pipeline and not self._held and self._problem is None:
                self._answering.keep_alive = False
            self._reach = Reach(self.transport, self.loop, lambda: self._answering)
        return True

    def _is_cut_short(self) -> bool:
        """Drop a request that will never be complete. Returns True if its answer is due."""
        if self._in_head:
            return False
        if self.cycle is not self._answering:
            self._in_head = True
            self.pipeline.popleft()
            return False
        return True

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
        if taken is not None:  # the kernel drops its buffer, too
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()  # closing would wait for the client

    # -- reading -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        if self._must_wait():
            self._held += data
            if len(self._held) > MAX_HELD_BYTES:
                self.flow.pause_reading()
        else:
            self._read(data)
            self._wait_for_client()

    def _must_wait(self) -> bool:
        """True if the next byte belongs to a request after the one being answered."""
        return self._answering is not None and (self._in_head or self.cycle is not self._answering)

    def _read(self, data: bytes) -> None:
        began_in_head = self._in_head
        if began_in_head:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._read(self._without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(self._problem or Problem(status=400, message=f"this is not valid HTTP: {error}"))
        else:
            if began_in_head and self._in_head and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large_head())
            elif not self._in_head and self._framing_bytes > MAX_FRAMING_BYTES:
                what = f"chunk extensions and trailers are larger than {MAX_FRAMING_BYTES} bytes"
                self._refuse(Problem(status=431, message=f"{what}: leave them out"))

    def _without_upgrade(self) -> bytes:
        """The newest head, parsed again without the upgrade to another protocol."""
        kept = [name + b": " + value for name, value in self.headers if name not in UPGRADES]
        return b"\r\n".join([self._line, *kept, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop_parser(Problem(status=414, message=f"the URL is larger than {MAX_URL_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which is ignored
        if len(self.headers) == MAX_FIELDS:
            self._stop_parser(Problem(status=431, message=f"there are more than {MAX_FIELDS} headers: send fewer"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._stop_parser(_too_large_head())
        if len(self.pipeline) == MAX_AHEAD:
            self._stop_parser(Problem(status=400, message=f"more than {MAX_AHEAD} requests were sent ahead"))
        if self.parser.get_method() == b"CONNECT":
            self._stop_parser(Problem(status=405, message="CONNECT is not allowed here"))
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._stop_parser(Problem(status=400, message=f"there are {hosts} Host headers: HTTP/1.1 wants one"))
        if self.parser.should_upgrade():
            self._line = self.parser.get_method() + b" " + self.url + b" HTTP/1.1"
            return  # parsed again without it
        self.cycle = exchange = self._new_exchange()
        self._in_head, self._head_bytes, self._framing_bytes = False, 0, 0
        self._stop_timer()
        if self._answering is None:
            self._start_asgi_task(exchange, self.app)
        else:
            self.pipeline.appendleft((exchange, self.app))

    def _new_exchange(self) -> Exchange:
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            self._stop_parser(Problem(status=505, message=f"HTTP/{version} is not spoken here: use HTTP/1.1"))
        scope = cast(dict[str, Any], self.scope)
        scope["http_version"] = version
        scope["method"] = self.parser.get_method().decode("ascii")
        try:
            path, query = path_and_query(self.url)
            scope["path"] = self.root_path + unquote(path.decode("ascii"))
        except (httptools.HttpParserInvalidURLError, ValueError):
            self._stop_parser(Problem(status=400, message="the URL of the request line is not valid"))
        scope["raw_path"] = self.root_path.encode("ascii") + path
        scope["query_string"] = query
        state = self._state()
        state.received_at = state.read_at = time.monotonic()
        return Exchange(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = max(0, self._framing_bytes - (1 + FRAMING_PER_BYTE) * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_head:
            return  # an upgrade without a body
        self._in_head, self._begun = True, False
        self._stop_timer()
        self._state().read_at = time.monotonic()
        super().on_message_complete()

    def _state(self) -> RequestScope:
        return request_scope(cast(dict[str, Any], self.scope))

    def _stop_parser(self, problem: Problem) -> NoReturn:
        self._problem = problem
        raise ValueError(problem.message)  # `feed_data` then fails

    # -- answering -----------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._answering = None
        super().on_response_complete()  # starts the next request, if it was read already
        if self.transport.is_closing() or (self._answering is not None and self._must_wait()):
            return
        if self._problem is not None:
            self._say(self._problem)
        elif self._held:
            held, self._held = bytes(self._held), bytearray()
            self._read(held)
            if self._reach is not None and self._is_cut_short():
                self.transport.close()
        self._wait_for_client()

    def _wait_for_client(self) -> None:
        """Wait for the client's next request, or for the rest of one, if no answer is pending."""
        if self._refused or self._answering is not None or self.transport.is_closing():
            return
        if self._reach is not None:
            self.transport.close()  # nothing more comes
        elif self._begun:
            self._unset_keepalive_if_required()
            if self._timer is None:
                self._start_timer()
        elif (
            self._timer is None and self.timeout_keep_alive_task is None
        ):  # otherwise it sent no request yet, or waits already
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._refuse(Problem(status=408, message=f"no complete request within {self.head_timeout_s:g} s"))

    # -- refusing ------------------------------------------------------------------------------------------------------

    def _turn_away(self) -> None:
        """Answer, and close a little later: closing while a request arrives would reset the answer as well."""
        self.connections.discard(self)  # it no longer counts
        self._refused = True
        if not self._leaving:  # logged once for a crowd
            log.warning("http.too_many_connections", extra={"open": len(self.connections)})
        if len(self._leaving) >= self.max_leaving:
            self.transport.abort()
            return
        self._leaving.add(self)
        message = f"{self.max_connections} connections are open, as many as may be: try again later, or elsewhere"
        self._say(Problem(status=503, message=message, code="too_many_connections"))

    def _refuse(self, problem: Problem) -> None:
        """Stop reading this connection, and send an error after the pending answers."""
        self._refused, self._problem = True, problem
        self._held.clear()
        self._stop_timer()
        newest: Exchange | None = None if self._in_head else cast(Exchange, self.cycle)
        self._in_head = True  # the rest of it is not read
        if newest is None or newest is not self._answering:
            if newest is not None and not newest.response_complete:
                self.pipeline.popleft()
            elif newest is not None:
                self._problem = None  # the error was answered already
            if self._answering is None:
                self._say(self._problem)
            return
        begun = newest.response_started
        newest.give_up()
        self._say(None if begun else problem)

    def _say(self, problem: Problem | None) -> None:
        """Send the final error. Without a path there is no dialect's form."""
        if self.transport.is_closing():
            return
        if problem is None:
            self.transport.close()
            return
        body = msgspec.json.encode(error_object(problem))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        head += f"x-request-id: {uuid.uuid4().hex}\r\n"
        head += f"retry-after: {RETRY_AFTER_S}\r\n" if problem.status == 503 else ""
        self.transport.write(STATUS_LINE[problem.status] + head.encode() + b"\r\n" + body)
        if self._reach is not None:
            self.transport.close()  # no incoming data can reset it
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LEAVE_TIMEOUT_S, self.transport.close)


def _too_large_head() -> Problem:
    return Problem(status=431, message=f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes")


def bounded_to(max_connections: int) -> type[BoundedProtocol]:
    """`BoundedProtocol` with a maximum number of connections."""

    class Bounded(BoundedProtocol):
        pass

    Bounded.max_connections = max_connections
    return Bounded
