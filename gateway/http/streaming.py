"""Streamed answers that stop the work behind them however they end, and server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

EVENTS = "text/event-stream"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_json = msgspec.json.Encoder()
# str.splitlines, and with it httpx, also ends lines at these three, which JSON does not escape.
_LINE_ENDS = [(mark.encode(), b"\\u%04x" % ord(mark)) for mark in ("\x85", "\u2028", "\u2029")]


def event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event, also for clients that end lines wherever Unicode does."""
    said = _json.encode(chunk)
    if not said.isascii():
        for character, escape in _LINE_ENDS:
            said = said.replace(character, escape)
    return b"data: " + said + b"\n\n"


class ByteStream(StreamingResponse):
    """A streamed answer. `close` runs when the connection is through with it, even unstarted.

    An iterator's own `finally` would not run if the client hung up before the first chunk.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        media_type: str = EVENTS,
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
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


async def disconnected(request: Request) -> None:
    """Return when the client hung up. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
