"""One stream, watched from both sides: when each token's frame was on NATS, and when its event was at the client.

    python -m benchmarks.gateway.watcher PORT NATS_PORT TOKENS

Prints a line when both sides are heard, and at the end [[instant, seconds late], …] by token as JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from itertools import accumulate

from benchmarks.gateway.client import DONE, PATH, Counts, Stream, chat
from common.messages import frame_decoder

HEAD = re.compile(rb"MSG \S+ 1 (?:\S+ )?(\d+)\r\n")
ALL_FRAMES = b"baton.frames.>"
CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"lang":"bench","version":"1","protocol":1}\r\n'


class Watched(Stream):
    """The client's side: each piece with its time."""

    def __init__(self) -> None:
        super().__init__(Counts(), PATH, DONE)
        self.pieces: list[tuple[float, bytes]] = []

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))
        super().data_received(data)


class Frames(asyncio.Protocol):
    """The bus's side, as bytes: reading them waits until the stream is over."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.heard = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(CONNECT + b"SUB " + ALL_FRAMES + b" 1\r\n")  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))
        self.heard.set()

    def messages(self) -> list[tuple[float, bytes]]:
        """Each message with the time of its last byte."""
        whole, ends = b"".join(data for _, data in self.pieces), [*accumulate(len(data) for _, data in self.pieces)]
        found, at, piece = [], 0, 0
        while head := HEAD.search(whole, at):
            end = head.end() + int(head[1])
            while ends[piece] < end:
                piece += 1
            found.append((self.pieces[piece][0], whole[head.end() : end]))
            at = end
        return found


async def watch(port: int, nats_port: int, tokens: int) -> list[tuple[float, float]]:
    loop = asyncio.get_running_loop()
    _, frames = await loop.create_connection(Frames, "127.0.0.1", nats_port)
    _, stream = await loop.create_connection(Watched, "127.0.0.1", port)
    asking = asyncio.create_task(stream.ask(chat(tokens, return_token_ids=True)))
    await frames.heard.wait()
    print("watching", flush=True)
    await asking
    name = re.search(rb'"id":"([^"]+)"', b"".join(data for _, data in stream.pieces))
    assert name is not None
    written = _written(frames.messages(), f"{name[1].decode()}-0")
    told = re.compile(rb'"token_ids":\[([\d,]+)\]')
    arrived = [at for at, data in stream.pieces for ids in told.findall(data) for _ in ids.split(b",")]
    return [(at, at - written[position]) for position, at in enumerate(arrived) if position in written]


def _written(messages: list[tuple[float, bytes]], request_id: str) -> dict[int, float]:
    """Position -> when it was on the bus first."""
    found: dict[int, float] = {}
    for at, message in messages:
        for tokens in frame_decoder.decode(message).tokens:
            if tokens.request_id == request_id:
                for offset in range(len(tokens.token_ids) // 4):
                    found.setdefault(tokens.position + offset, at)
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(watch(*map(int, sys.argv[1:])))))
