"""Two ends of a transport: this process's, and one in another process."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import torch

from common.messages import KVLayout, Region
from engine.cache.pages import pool_dtype, pool_shape
from kvtransfer.transport import Link, Transport, open_transport
from tests import preloaded
from tests.preloaded import Process

BOUND_S = 90.0  # far above what anything here takes: what exceeds it hangs
LOADED = (
    "engine.cache.pages",
    "kvtransfer.digest",
    "kvtransfer.transport",
    "kvtransfer.shm",
)  # UCX is a process's own
SMALL = KVLayout(num_blocks=64, num_layers=2, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32")
LARGE = KVLayout(num_blocks=80, num_layers=8, block_size=16, num_kv_heads=8, head_dim=64, dtype="float32")  # 40 MiB
SCATTERED = [63, 0, 1, 2, 40, 17, 18, 5, 62, 33]


class Receiver:
    """The other process."""

    def __init__(self, process: Process, said: asyncio.StreamReader, orders: asyncio.StreamWriter) -> None:
        self.process = process
        self.region = SMALL_REGION
        self._said = said
        self._orders = orders

    async def call(self, do: str, **arguments: Any) -> Any:
        self._orders.write(json.dumps({"do": do} | arguments).encode() + b"\n")
        return await self.answer()

    async def no_more(self) -> Any:
        """Its last word."""
        self._orders.write_eof()
        return await self.answer()

    async def bytes_of(self, blocks: list[int]) -> bytes:
        return base64.b64decode(await self.call("bytes", blocks=blocks))

    async def answer(self) -> Any:
        async with asyncio.timeout(BOUND_S):
            return json.loads(await self._said.readline())

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def start_receiver(name: str, layout: KVLayout = SMALL, incarnation: int = 1) -> AsyncIterator[Receiver]:
    (said, its_output), (orders, its_input) = socket.socketpair(), socket.socketpair()
    arguments = (name, msgspec.json.encode(layout).decode(), str(incarnation))
    with its_output, its_input:
        files = (its_output.fileno(), 2, its_input.fileno())
        process = await preloaded.start(
            "tests.integration.kv_receiver", arguments, loads=LOADED, env=os.environ, files=files
        )
    _, writer = await asyncio.open_connection(sock=orders)
    reader, closer = await asyncio.open_connection(sock=said, limit=1 << 26)
    receiver = Receiver(process, reader, writer)
    try:
        receiver.region = msgspec.convert(await receiver.answer(), Region)
        yield receiver
        if process.returncode is None:
            assert await receiver.no_more() == "closed"
            async with asyncio.timeout(BOUND_S):
                assert await process.wait() == 0  # the interpreter leaves without hanging
    finally:
        if process.returncode is None:
            await receiver.kill()
        writer.close()
        closer.close()


SMALL_REGION = Region(transport="", incarnation=0, layout=SMALL, address={})


class Writer:
    """This process's transport and pool, full of random bits (NaN and all)."""

    def __init__(self, transport: Transport, layout: KVLayout) -> None:
        self.transport = transport
        self.layout = layout
        self.region = SMALL_REGION
        self.pool = transport.allocate(pool_shape(layout), pool_dtype(layout), "cpu")
        bits = torch.randint(0, 256, (layout.num_blocks, layout.block_bytes), dtype=torch.uint8)
        self.pool.view(torch.uint8).reshape(bits.shape).copy_(bits)

    def bytes_of(self, blocks: list[int]) -> bytes:
        return self.pool[blocks].view(torch.uint8).numpy().tobytes()


@asynccontextmanager
async def start_writer(name: str, layout: KVLayout = SMALL) -> AsyncIterator[Writer]:
    transport = open_transport(name)
    writer = Writer(transport, layout)
    writer.region = await transport.open(writer.pool, layout, 99)
    try:
        yield writer
    finally:
        await transport.close()


async def push(link: Link, source: list[int], destination: list[int], *, lease: int = 1, generation: int = 7) -> bytes:
    async with asyncio.timeout(BOUND_S):
        return await link.push(
            lease_id=lease,
            generation=generation,
            source_blocks=source,
            destination_blocks=destination,
            timeout_s=BOUND_S / 2,
        )
