"""Server-sent events that stop the work behind them, however their connection ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_json = msgspec.json.Encoder()
# Python's str.splitlines, and with it httpx, ends lines at these three as well; JSON escapes only the others by itself.
_LINE_ENDS = [(mark.encode(), b"\\u%04x" % ord(mark)) for mark in ("\x85", "\u2028", "\u2029")]


def event(chunk: dict[str, Any]) -> bytes:
    """One event of a stream, on one line for clients, too, that end lines wherever Unicode says that one ends."""
    said = _json.encode(chunk)
    if not said.isascii():
        for character, escape in _LINE_ENDS:
            said = said.replace(character, escape)
    return b"data: " + said + b"\n\n"


class EventStream(StreamingResponse):
    """A streamed answer. `close` runs when the connection is through with it, also if no event was ever asked for.

    An iterator's own `finally` is not enough for that: a client that hung up before the first event leaves it unstarted.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, close: Callable[[], Awaitable[None]], headers: Mapping[str, str]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**_HEADERS, **headers})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self._events.aclose()
            finally:
                await self._close()


async def disconnected(request: Request) -> None:
    """Return when the client hung up. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
