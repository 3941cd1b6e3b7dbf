"""`python -m tests.chaos.flood PORT RATE SECONDS FIRST`: a light client in a process of its own; prints a JSON list a request.

Raw sockets and prepared bytes: on a machine that it shares with what it measures, a client of httpx would measure itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import time
from typing import Any

PROMPT_TOKENS, ANSWER_TOKENS = 100, 8
DEADLINE_S, GRACE_S = 3.0, 20.0
IDLE_CONNECTIONS = 64  # open before it begins
NICER = -5  # the client should be on time; without the right to it, it is as nice as anybody


def body_of(number: int) -> dict[str, Any]:
    """Request `number`: no two prompts have a block in common."""
    prompt = [number % 480 + 3, number // 480 % 480 + 3, *range(10, 8 + PROMPT_TOKENS)]
    return {
        "model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "timeout": DEADLINE_S,
    }  # fmt: skip


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._seen = b""
        self._answer: asyncio.Future[tuple[bytes, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, found, body = self._seen.partition(b"\r\n\r\n")
        if found and len(body) >= _length(head) and self._answer is not None and not self._answer.done():
            self._seen = b""
            self._answer.set_result((head.lower(), body))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionError("closed without an answer"))

    async def ask(self, raw: bytes) -> tuple[bytes, bytes]:
        """Head and body of the answer."""
        assert self.transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(raw)
        return await self._answer


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _raw(number: int) -> bytes:
    body = json.dumps(body_of(number)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Flood:
    """Sends on time, whatever comes back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []
        self.heard: list[
            list[Any]
        ] = []  # number, sent after, seconds, status, Retry-After, choices, error's code, broken

    async def run(self, *, rate: float, seconds: float, first: int) -> None:
        prepared = [_raw(first + index) for index in range(int(rate * seconds))]
        self._idle = [await self._connect() for _ in range(IDLE_CONNECTIONS)]
        gc.freeze()
        gc.disable()
        began, asking = time.monotonic(), []
        for index, raw in enumerate(prepared):
            await asyncio.sleep(max(0.0, began + index / rate - time.monotonic()))
            asking.append(asyncio.create_task(self._ask(first + index, raw, began)))
        await asyncio.gather(*asking)

    async def _connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
        return connection

    async def _ask(self, number: int, raw: bytes, began: float) -> None:
        connection = self._idle.pop() if self._idle else await self._connect()
        sent, head, body, broken = time.monotonic(), b"", b"{}", ""
        try:
            async with asyncio.timeout(DEADLINE_S + GRACE_S):
                head, body = await connection.ask(raw)
            self._idle.append(connection)
        except (OSError, TimeoutError) as error:
            broken = type(error).__name__
            if connection.transport is not None:
                connection.transport.abort()
        seconds, answer = time.monotonic() - sent, json.loads(body)
        status = int(head.split()[1]) if head else 0
        self.heard.append(
            [
                number, sent - began, seconds, status, b"\r\nretry-after:" in head, answer.get("choices", []),
                answer.get("error", {}).get("code", ""), broken,
            ]
        )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Entry point."""
    with contextlib.suppress(OSError):
        os.nice(NICER)
    port, rate, seconds, first = int(arguments[0]), float(arguments[1]), float(arguments[2]), int(arguments[3])
    flood = Flood(port)
    asyncio.run(flood.run(rate=rate, seconds=seconds, first=first))
    for heard in flood.heard:
        print(json.dumps(heard))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
