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


def event(chunk: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + _json.encode(chunk) + b"\n\n"


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
