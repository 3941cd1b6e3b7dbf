"""Workers of several ranks: the first is in this process, each further one in its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch

from common.messages import KVLayout, Region
from engine.cache.pages import pool_dtype, pool_shape
from kvtransfer.plan import Item, blocks_per_entry
from kvtransfer.ranks.leader import RankedTransport
from kvtransfer.sender import Run
from kvtransfer.transport import Transport, open_transport, push_run
from tests import preloaded
from tests.integration.kv_peers import BOUND_S, LOADED
from tests.preloaded import Process
from tests.unit.kvtransfer.widths import MODELS, Model, ranks_of

ENTRIES = 3  # of each group
Tables = list[list[tuple[int, ...]]]


class Worker:
    """The first rank of a worker, and the processes of the others."""

    def __init__(self, transport: RankedTransport, pool: torch.Tensor, region: Region, further: list[Process]) -> None:
        self.transport, self.pool, self.region, self.further = transport, pool, region, further
        self.layout = region.layout
        self.tables = tables_of(region.layout)
        self.items = [
            Item(group, entry, number)
            for group, count in enumerate(blocks_per_entry(region.layout))
            for entry in range(ENTRIES)
            for number in range(count)
        ]
        self.blocks = [self.tables[item.group][item.entry][item.number] for item in self.items]

    async def hand_over(self, to: Worker, lease: tuple[int, int] = (1, 7)) -> bytes:
        """Push all entries into another worker's; return their digests."""
        to.transport.expect(*lease, to.blocks)
        await to.transport.told()
        link = await self.transport.connect(to.region)
        run = Run(items=to.items, destination_blocks=to.blocks)
        digests = await push_run(link, run, self.tables, lease=lease, timeout_s=BOUND_S)
        assert await to.transport.arrived(*lease, BOUND_S)
        to.transport.forget(*lease)
        return digests

    def holds(self, model: str) -> bool:
        """True if this worker of one rank has all entries' contents."""
        expected = torch.zeros_like(self.pool)
        fill(expected, self.layout, model)
        return torch.equal(expected.view(torch.uint8), self.pool.view(torch.uint8))


@asynccontextmanager
async def running(name: str, model: str, width: int, *, filled: bool = False) -> AsyncIterator[Worker]:
    """A worker of so many ranks; `filled`: with the model's entries."""
    channels, further = list[socket.socket](), list[Process]()
    async with AsyncExitStack() as stack:
        for rank in range(1, width):
            mine, its = socket.socketpair()
            channels.append(stack.enter_context(mine))
            arguments = (name, model, str(width), str(rank), "filled" if filled else "empty")
            with its:
                started = await preloaded.start(
                    "tests.integration.kv_rank", arguments, loads=LOADED, env=os.environ, files=(2, 2, its.fileno())
                )
            stack.callback(started.kill)
            further.append(started)
        transport, layout = RankedTransport(open_transport(name), channels), ranks_of(MODELS[model], width)[0]
        pool = new_pool(transport, layout, model if filled else "")
        stack.push_async_callback(transport.close)
        yield Worker(transport, pool, await transport.open(pool, layout, 99), further)


async def stop(pid: int) -> None:
    """Stop a process, and wait until it does nothing."""
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(BOUND_S):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            await asyncio.sleep(0.001)


def new_pool(transport: Transport, layout: KVLayout, model: str) -> torch.Tensor:
    """A rank's pool, full of a model's entries; "": zeros."""
    pool = transport.allocate(pool_shape(layout), pool_dtype(layout), "cpu")
    if model:
        fill(pool, layout, model)
    return pool


def fill(pool: torch.Tensor, layout: KVLayout, model: str) -> None:
    lanes = pool.view(pool.shape[0], -1).view(torch.uint8)
    for group, entries in enumerate(tables_of(layout)):
        for number, entry in enumerate(entries):
            contents = Model(MODELS[model], seed=number).entry(layout, group)
            for block, content in zip(entry, contents, strict=True):
                lanes[block] = torch.from_numpy(content)


def tables_of(layout: KVLayout) -> Tables:
    """The entries of a sequence, by group, from the pool's second block on; those of a group go backwards."""
    tables, next_one = Tables(), 1
    for count in blocks_per_entry(layout):
        firsts: Sequence[int] = range(next_one, next_one + ENTRIES * count, count)
        tables.append([tuple(range(first, first + count)) for first in reversed(firsts)])
        next_one += ENTRIES * count
    return tables
