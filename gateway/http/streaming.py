"""Streamed answers, which stop their work however they end, and server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.http.exchange import BodyWriter, request_scope

EVENTS = "text/event-stream"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_json = msgspec.json.Encoder()
# str.splitlines, and with it httpx, also splits lines at these three, which JSON does not escape.
_LINE_ENDS = [(mark.encode(), b"\\u%04x" % ord(mark)) for mark in ("\x85", "\u2028", "\u2029")]


def event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event, also for clients that split lines wherever Unicode does."""
    return b"data: " + said(chunk) + b"\n\n"


def named_event(chunk: dict[str, Any]) -> bytes:
    """An event named like its chunk's `type`."""
    return b"event: " + chunk["type"].encode() + b"\n" + event(chunk)


def said(value: Any) -> bytes:
    """JSON for an event."""
    text = _json.encode(value)
    if not text.isascii():
        for character, escape in _LINE_ENDS:
            text = text.replace(character, escape)
    return text


class ByteStream(StreamingResponse):
    """A streamed answer. `close` runs when the connection is done with it, even if unstarted.

    An iterator's own `finally` would not run if the client hung up before the first chunk.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
        media_type: str = EVENTS,
    ) -> None:
        super().__init__(chunks, media_type=media_type, headers={**_HEADERS, **headers})
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self._chunks.aclose()
            finally:
                await self._close()


class WrittenStream(Response):
    """A streamed answer written by callbacks: `begin` gets the connection's writer once the head is sent.

    `close` runs when the connection is through with it, even unstarted.
    """

    def __init__(
        self,
        *,
        media_type: str,
        begin: Callable[[BodyWriter], None],
        close: Callable[[], None],
        headers: Mapping[str, str],
        idle_event: bytes = b"",
    ) -> None:
        self.status_code, self.background, self.media_type = 200, None, media_type
        self.init_headers({**_HEADERS, **headers})
        self._begin = begin
        self._idle_event = idle_event
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = request_scope(scope).writer
        try:
            if writer is None:
                raise RuntimeError("streams are written by gateway.http.connection alone: serve with its protocol")
            writer.hold_head()
            writer.idle_event = self._idle_event
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._begin(writer)
            writer.write(b"")  # sends the head, if nothing else was written
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            self._close()
