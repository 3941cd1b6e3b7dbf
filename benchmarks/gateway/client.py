"""A client that costs little: it sends the same request over many connections and counts what comes back."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

PATH = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
TIMEOUT_S = 120.0


def chat(max_tokens: int, *, text: str = "What is the capital of France?", **more: Any) -> bytes:
    """The body of a streamed chat."""
    asked = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    return json.dumps(asked | {"ignore_eos": True, "stream": True, "temperature": 1.0} | more).encode()


@dataclass(slots=True)
class Counts:
    """The results of a load."""

    events: int = 0  # of content: without a chat's first and the end
    reads: int = 0  # in how many pieces the socket gave them
    seconds: float = 0.0


class Stream(asyncio.Protocol):
    """One connection, one answer at a time. `end` closes a whole stream."""

    def __init__(self, counts: Counts, path: str, end: bytes) -> None:
        self._counts = counts
        self._path = path
        self._end = end
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._over: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, body: bytes) -> None:
        """Send a request and wait until its answer has ended. Raises RuntimeError for another one than a whole stream."""
        assert self._transport is not None
        self._over, self._tail = asyncio.get_running_loop().create_future(), b""
        head = f"POST {self._path} HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        async with asyncio.timeout(TIMEOUT_S):
            await self._over

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._counts.reads += 1
        self._counts.events += data.count(b"data: {")  # an event is never cut on the loopback: it is one write
        self._tail = self._tail[-32:] + data
        assert self._over is not None
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200 ") and not self._over.done():
            self._over.set_exception(RuntimeError(f"refused: {data[-500:]!r}"))
        if self._tail.endswith(b"0\r\n\r\n") and not self._over.done():
            if self._end not in self._tail:
                self._over.set_exception(RuntimeError(f"no whole answer: {self._tail[-500:]!r}"))
            else:
                self._over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(exc or ConnectionError("the server closed the connection"))


async def load(
    port: int, body: bytes, *, streams: int, requests: int = 0, path: str = PATH, end: bytes = DONE
) -> Counts:
    """Have `streams` connections ask at once, and again until there were `requests` in all; 0: each once."""
    counts, loop = Counts(), asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Stream(counts, path, end), "127.0.0.1", port) for _ in range(streams)]
    left = max(0, requests - streams)

    async def ask(stream: Stream) -> None:
        nonlocal left
        await stream.ask(body)
        while left > 0:
            left -= 1
            await stream.ask(body)

    began = time.monotonic()
    await asyncio.gather(*(ask(stream) for _, stream in made))
    counts.seconds = time.monotonic() - began
    for _, stream in made:
        stream.close()
    return counts
