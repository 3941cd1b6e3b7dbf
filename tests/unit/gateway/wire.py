"""A client that says any bytes to a gateway, and hears answers as a strict client would."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import h11

from tests.unit.gateway.conftest import MODEL, Gateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT_S = 15.0


@dataclass
class Heard:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):  # it said no before all was sent
            await self.writer.drain()

    async def until(self, mark: bytes) -> bytes:
        """Everything up to `mark`."""
        async with asyncio.timeout(LIMIT_S):
            return await self.reader.readuntil(mark)

    async def rest(self, *, before: bytes = b"") -> list[Heard]:
        """All answers until the gateway closes. `before` was read already. Raises h11.RemoteProtocolError for what is no HTTP."""
        async with asyncio.timeout(LIMIT_S):
            return answers_in(before + await self.reader.read())


def answers_in(data: bytes) -> list[Heard]:
    """The answers that `data` is, whole and one after the other. Raises h11.RemoteProtocolError."""
    heard: list[Heard] = []
    while data:
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(data)
        client.receive_data(b"")
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                headers = {name.decode(): value.decode() for name, value in event.headers}
                heard.append(Heard(event.status_code, headers, b""))
            elif isinstance(event, h11.Data):
                heard[-1].body += event.data
            elif not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError(f"{event} in {data!r}")
        data = client.trailing_data[0]
    return heard


@contextlib.asynccontextmanager
async def wire(gateway: Gateway) -> AsyncIterator[Wire]:
    """A connection to `gateway`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def get(path: str = "/health", *, version: str = "1.1", headers: str = "") -> bytes:
    return f"GET {path} HTTP/{version}\r\nhost: localhost\r\n{headers}\r\n".encode()


def ask(*, version: str = "1.1", headers: str = "", path: str = COMPLETIONS, **fields: Any) -> bytes:
    """A request for a completion."""
    body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 4} | fields)
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{headers}\r\n{body}".encode()


def chunked(body: bytes = b"", *, then: bytes = b"") -> bytes:
    """A request for a completion whose body comes in chunks, here one, and `then` what follows its last."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    framed = b"%x\r\n%b\r\n0\r\n%b" % (len(body), body, then) if body else b""
    return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + framed
