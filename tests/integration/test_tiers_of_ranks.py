"""Blocks copied to the host memory of ranks, each a process of its own, and back."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.transport import TransferError
from tests.integration.kv_peers import BOUND_S
from tests.integration.kv_ranks import Worker, running, stop
from worker.tier.host_memory import HostMemory
from worker.tier.host_store import PrivateStore
from worker.tier.ranks.asking import Asking, FurtherMemory
from worker.tier.ranks.questions import Room

MODEL, SLOTS = "windows and states", 64


def memory_of(worker: Worker) -> tuple[HostMemory, Asking]:
    ask = Asking.of(worker.transport)
    assert ask is not None
    further = FurtherMemory(ask, Room(SLOTS))
    return HostMemory(worker.pool, worker.layout, PrivateStore(SLOTS), further), ask


@pytest.mark.parametrize("width", [2, 4])
async def test_shares_come_back_to_every_rank(width: int) -> None:
    async with running("shm", MODEL, width, filled=True) as worker:
        memory, _ = memory_of(worker)
        blocks = worker.blocks
        slots = [*range(len(blocks))]
        digests = await worker.transport.digests(blocks)
        assert await asyncio.to_thread(memory.store_blocks, slots, blocks) == digests
        # Into the blocks in another order, as if evicted meanwhile, and back: on each rank they are what they were.
        moved = await asyncio.to_thread(memory.load, slots, blocks[::-1])
        assert moved == await worker.transport.digests(blocks[::-1]) == digests
        assert await asyncio.to_thread(memory.load, slots, blocks) == digests


async def test_a_rank_that_ends_fails_a_copy_and_a_worker_that_leaves_waits_for_none() -> None:
    async with running("shm", MODEL, 2, filled=True) as worker:
        memory, ask = memory_of(worker)
        [process] = worker.further
        await stop(process.pid)
        storing = [asyncio.create_task(asyncio.to_thread(memory.store_blocks, [0], [1])) for _ in range(2)]
        process.kill()
        async with asyncio.timeout(BOUND_S):
            for each in storing:
                with pytest.raises(TransferError, match="rank 1 is gone"):
                    await each
    async with running("shm", MODEL, 2, filled=True) as worker:
        memory, ask = memory_of(worker)
        [process] = worker.further
        await stop(process.pid)
        waits = asyncio.create_task(asyncio.to_thread(memory.store_blocks, [0], [1]))
        await asyncio.sleep(0)
        ask.close()
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(TransferError, match="leaves"):
                await waits
        process.kill()
