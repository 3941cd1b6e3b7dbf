"""The gateway's reference: servers that write the same events at the same pace and do nothing else.

python -m benchmarks.gateway.plain fastapi|protocol PORT STEP_MS
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator

import httptools
import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from benchmarks.gateway.client import DONE, PATH

TEXT = " token"
_HEAD = {"id": f"chatcmpl-{'0' * 32}", "object": "chat.completion.chunk", "created": 1_800_000_000, "model": "demo"}
_json = msgspec.json.Encoder()


def event(delta: dict[str, str], finish: str | None = None) -> bytes:
    """An event as the gateway writes it."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return b"data: " + _json.encode({**_HEAD, "choices": [choice]}) + b"\n\n"


class Steps:
    """One clock for all streams: each gets a token at each tick, the one that asked first the first."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: list[asyncio.Queue[None]] = []
        self._writers: list[Writer] = []
        self._ticks: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._due = asyncio.get_running_loop().time()
        self._tick()

    def _tick(self) -> None:
        for queue in self._streams:
            queue.put_nowait(None)
        self._writers = [writer for writer in self._writers if writer.step()]
        loop = asyncio.get_running_loop()
        self._due = max(self._due + self._step_s, loop.time())
        loop.call_at(self._due, self._tick)

    async def tokens(self, count: int) -> AsyncIterator[None]:
        queue: asyncio.Queue[None] = asyncio.Queue()
        self._streams.append(queue)
        try:
            for _ in range(count):
                await queue.get()
                yield
        finally:
            self._streams.remove(queue)

    def add(self, writer: Writer) -> None:
        self._writers.append(writer)


class Writer(asyncio.Protocol):
    """HTTP by httptools, each event from a template: the least that Python takes."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._left = 0
        before, after = event({"content": TEXT}).split(_json.encode(TEXT))
        self._before, self._after = before, after

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._left, self._body = msgspec.json.decode(self._body)["max_tokens"], b""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._write(head + _chunk(event({"role": "assistant", "content": ""})))
        self._steps.add(self)

    def step(self) -> bool:
        """Write a token; False behind the last."""
        self._left -= 1
        text = _json.encode(TEXT)
        if self._left:
            self._write(_chunk(self._before + text + self._after))
            return True
        self._write(_chunk(event({"content": TEXT}, "length")) + _chunk(DONE) + b"0\r\n\r\n")
        return False

    def _write(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def application(steps: Steps) -> FastAPI:
    """The echo: a route of FastAPI, a generator, an event a token."""
    app = FastAPI()

    @app.post(PATH)
    async def answer(request: Request) -> StreamingResponse:
        count = msgspec.json.decode(await request.body())["max_tokens"]
        return StreamingResponse(events(count), media_type="text/event-stream")

    async def events(count: int) -> AsyncIterator[bytes]:
        yield event({"role": "assistant", "content": ""})
        left = count
        async for _ in steps.tokens(count):
            left -= 1
            yield event({"content": TEXT}, None if left else "length")
        yield DONE

    return app


async def _serve(kind: str, port: int, step_s: float) -> None:
    steps = Steps(step_s)
    steps.begin()
    if kind == "fastapi":
        config = uvicorn.Config(application(steps), port=port, log_level="warning", access_log=False, http="httptools")
        await uvicorn.Server(config).serve()
    else:
        server = await asyncio.get_running_loop().create_server(lambda: Writer(steps), "127.0.0.1", port)
        await server.serve_forever()


if __name__ == "__main__":
    if not re.fullmatch("fastapi|protocol", sys.argv[1]):
        raise SystemExit(f"{sys.argv[1]}: choose fastapi or protocol")
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 1000))
