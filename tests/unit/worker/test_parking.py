"""A worker's sleep: what runs ends first, the pool's memory is given back and nothing is found in it, and it wakes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.messages import Drain, Region, RolesReply
from common.words import WorkerStatus
from engine.cache import memory
from engine.cache.block_pool import BlockPool
from engine.cache.memory import EmptiedPool
from engine.parallel.group import RankLostError
from engine.weights.sleeping import Asleep, MovedOut
from kvtransfer.transport import Transfers
from tests.fakes.pair import running_worker
from tests.fakes.role import NotingRole
from tests.fakes.worker import Bench
from worker.control import Control
from worker.fencing import Fencing
from worker.parking import Parking


def use(pool: BlockPool, digest: bytes) -> None:
    """A block with this content is computed and released."""
    [block] = pool.allocate(1)
    pool.publish(block, digest)
    pool.release([block])


def named(bench: Bench, transport: str) -> Transfers:
    """The worker's transfers by a transport of this name."""
    return replace(bench.context.transfers, transport=type("Named", (), {"name": transport})())


class Parked:
    """A worker of one role that can be put to sleep, and each status that it told."""

    def __init__(self, bench: Bench, *, drain_s: float = 60.0, engine: object = None) -> None:
        """`engine`: the worker's, whose pool is on another device than the CPU."""
        self.bench, self.pool = bench, bench.context.cache.pool
        if engine is not None:
            elsewhere = replace(bench.context.cache, kv=bench.context.cache.kv.to("meta"))
            bench.context = replace(bench.context, cache=elsewhere, transfers=named(bench, "local"))
        self.role = NotingRole("decode")
        bench.roles.attach(self.role, active=True)
        self.told: list[WorkerStatus] = []
        self.changed = asyncio.Event()
        self.control = Control(
            identity=bench.context.identity,
            roles=bench.roles,
            jobs=bench.context.jobs,
            fencing=Fencing(bus=bench.bus, roles=bench.roles, identity=bench.context.identity),
            tell=self._tell,
            called=self.pool.returning.called,
        )
        self.parking = Parking(bench.context, self.control, tell=self._tell, drain_s=drain_s, engine=engine)

    async def _tell(self) -> None:
        self.told.append(self.bench.roles.status)
        self.changed.set()

    async def until(self, status: WorkerStatus) -> None:
        async with asyncio.timeout(60):
            while self.bench.roles.status is not status:
                self.changed.clear()
                await self.changed.wait()

    def pages(self) -> int:
        """Bytes of the pool's file in shared memory that take memory."""
        region = self.bench.context.transfers.region
        return Path("/dev/shm", region.address["file"]).stat().st_blocks * 512


@contextlib.asynccontextmanager
async def parked(*, drain_s: float = 60.0, engine: object = None, host_slots: int = 0) -> AsyncIterator[Parked]:
    async with running_worker(600, host_slots=host_slots) as bench:
        worker = Parked(bench, drain_s=drain_s, engine=engine)
        running = asyncio.create_task(worker.parking.run())
        try:
            yield worker
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_the_pools_memory_is_given_back_and_nothing_is_found_in_it() -> None:
    async with parked() as worker:
        use(worker.pool, b"content")
        worker.pool.drain_events()
        whole = worker.pages()
        worker.parking.ask(True)
        await worker.until(WorkerStatus.SLEEPING)
        assert worker.told == [WorkerStatus.DRAINING, WorkerStatus.SLEEPING]
        assert worker.pages() < whole / 10
        assert worker.pool.cached_digests() == []
        assert worker.pool.drain_events() == ([], [b"content"])
        assert worker.pool.num_empty == worker.pool.num_blocks
        reply = await worker.control.handle(Drain(draining=False))
        assert isinstance(reply, RolesReply)
        assert (reply.accepted, reply.reason) == (False, "the worker is sleeping")
        worker.parking.ask(False)
        await worker.until(WorkerStatus.READY)
        assert worker.pages() == whole  # taken before it is needed
        use(worker.pool, b"content")
        assert worker.pool.cached_digests() == [b"content"]


async def test_it_falls_asleep_once_nobody_has_a_block() -> None:
    async with parked() as worker:
        held = worker.pool.allocate(1)
        worker.parking.ask(True)
        await worker.until(WorkerStatus.DRAINING)
        assert worker.bench.roles.room() == 0
        worker.pool.release(held)
        await worker.until(WorkerStatus.SLEEPING)


async def test_what_runs_for_too_long_keeps_it_awake() -> None:
    async with parked(drain_s=0.05) as worker:
        worker.pool.allocate(1)
        worker.parking.ask(True)
        await worker.until(WorkerStatus.DRAINING)
        await worker.until(WorkerStatus.READY)
        assert worker.told == [WorkerStatus.DRAINING, WorkerStatus.READY]


async def test_who_is_wanted_meanwhile_stays_awake() -> None:
    async with parked() as worker:
        worker.pool.allocate(1)
        worker.parking.ask(True)
        await worker.until(WorkerStatus.DRAINING)
        worker.parking.ask(False)
        await worker.until(WorkerStatus.READY)


async def test_who_lacks_memory_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = asyncio.Event()

    def lacking(pool: torch.Tensor, advice: int) -> None:
        tried.set()
        raise OSError(12, os.strerror(12))

    async with parked() as worker:
        worker.parking.ask(True)
        await worker.until(WorkerStatus.SLEEPING)
        monkeypatch.setattr(memory, "_advise", lacking)
        worker.parking.ask(False)
        async with asyncio.timeout(60):
            while not tried.is_set():
                await asyncio.sleep(0)
        async with worker.control.changing:
            assert worker.bench.roles.status is WorkerStatus.SLEEPING


class MovingEngine:
    """An engine on a device: what it was asked, and the errors that it meets, one after another."""

    def __init__(self, *errors: MemoryError | None) -> None:
        self.asked, self.errors = list[str](), [*errors]
        self.moved = MovedOut.fallen([torch.ones(5)], torch.ones(3))

    def sleep(self, *, moves: bool) -> Asleep:
        assert moves
        self._meet("sleep")
        return self.moved

    def wake(self, asleep: Asleep) -> None:
        assert asleep is self.moved
        self._meet("wake")

    def _meet(self, asked: str) -> None:
        self.asked.append(asked)
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error


async def test_on_another_device_the_engine_moves_its_weights() -> None:
    engine = MovingEngine()
    async with parked(engine=engine) as worker:
        assert worker.parking.refusal == ""
        use(worker.pool, b"content")
        for status, asked in ((WorkerStatus.SLEEPING, ["sleep"]), (WorkerStatus.READY, ["sleep", "wake"])):
            worker.parking.ask(status is WorkerStatus.SLEEPING)
            await worker.until(status)
            assert engine.asked == asked
            assert worker.pool.cached_digests() == []


async def test_without_room_in_host_memory_it_stays_awake() -> None:
    engine = MovingEngine(MemoryError("host memory has no room"))
    async with parked(engine=engine) as worker:
        worker.parking.ask(True)
        await worker.until(WorkerStatus.DRAINING)
        await worker.until(WorkerStatus.READY)
        worker.parking.ask(True)
        await worker.until(WorkerStatus.SLEEPING)
        assert engine.asked == ["sleep", "sleep"]


async def test_without_room_on_the_device_it_sleeps_on_until_there_is_some() -> None:
    engine = MovingEngine(None, MemoryError("no room on cuda:0"))
    async with parked(engine=engine) as worker:
        worker.parking.ask(True)
        await worker.until(WorkerStatus.SLEEPING)
        while "wake" not in engine.asked:
            worker.parking.ask(False)
            await asyncio.sleep(0)
        async with worker.control.changing:
            assert worker.bench.roles.status is WorkerStatus.SLEEPING
        worker.parking.ask(False)
        await worker.until(WorkerStatus.READY)
        assert engine.asked == ["sleep", "wake", "wake"]


class RanksEngine:
    """An engine on the CPU with further ranks, of which one ends while it sleeps."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool, self.woke = pool, asyncio.Event()

    def sleep(self, *, moves: bool) -> Asleep:
        assert not moves
        return EmptiedPool.fallen(self.pool)

    def wake(self, asleep: Asleep) -> None:
        asyncio.run_coroutine_threadsafe(self._noted(), self.loop)
        raise RankLostError("rank 1 ended")

    async def _noted(self) -> None:
        self.woke.set()

    loop: asyncio.AbstractEventLoop


async def test_a_rank_that_is_lost_asleep_leaves_the_worker_to_its_end() -> None:
    """It is not ready, and still hears what is asked: the worker ends as after a pass that lost a rank."""
    async with running_worker(600) as bench:
        engine = RanksEngine(bench.context.cache.kv)
        engine.loop = asyncio.get_running_loop()
        worker = Parked(bench)
        parking = Parking(bench.context, worker.control, tell=worker._tell, drain_s=60.0, engine=engine)
        running = asyncio.create_task(parking.run())
        whole = worker.pages()
        for _ in range(2):
            parking.ask(True)
            await worker.until(WorkerStatus.SLEEPING)
            assert worker.pages() < whole / 10
            engine.woke.clear()
            parking.ask(False)
            async with asyncio.timeout(60):
                await engine.woke.wait()
            async with worker.control.changing:
                assert bench.roles.status is WorkerStatus.SLEEPING
        running.cancel()
        await asyncio.wait([running])


async def test_on_another_device_who_can_not_move_or_is_known_by_address_stays_awake() -> None:
    async with parked(engine=object()) as worker:
        assert worker.parking.refusal == "its KV cache is in the memory of meta, which is not given back"
    async with parked(engine=MovingEngine(), host_slots=4) as worker:
        assert worker.parking.refusal == "its host memory tier (--kv-host-mb) knows its KV cache by address"


async def test_beside_host_memory_a_worker_on_a_cpu_sleeps_and_wakes() -> None:
    async with parked(host_slots=4) as worker:
        assert worker.bench.context.cache.tier is not None
        use(worker.pool, b"content")
        whole = worker.pages()
        worker.parking.ask(True)
        await worker.until(WorkerStatus.SLEEPING)
        assert worker.pages() < whole / 10
        assert worker.pool.cached_digests() == []
        worker.parking.ask(False)
        await worker.until(WorkerStatus.READY)
        use(worker.pool, b"content")
        assert worker.pool.cached_digests() == [b"content"]


async def test_who_can_not_sleep_says_why() -> None:
    known = "peers know its KV cache by address (--transport {}): take local"
    async with parked() as worker:
        assert worker.parking.refusal == ""
        bench, region = worker.bench, worker.bench.context.transfers.region
        meta = replace(bench.context.cache, kv=bench.context.cache.kv.to("meta"))
        for transport, is_on_gpu, ranks, engine, why in (
            ("ucx", False, False, None, ""),
            ("shm", False, True, None, "nothing tells its further ranks"),
            ("shm", False, True, MovingEngine(), ""),
            ("local", True, True, MovingEngine(), ""),
            ("ucx", True, False, MovingEngine(), known.format("ucx")),
            ("cuda_ipc", True, False, MovingEngine(), known.format("cuda_ipc")),
        ):
            among = Region.joined([region, region]) if ranks else region
            transfers = replace(named(bench, transport), region=among)
            cache = meta if is_on_gpu else bench.context.cache
            context = replace(bench.context, cache=cache, transfers=transfers)
            assert Parking(context, worker.control, tell=worker._tell, drain_s=1.0, engine=engine).refusal == why


@pytest.mark.parametrize("shape", [(100,), (3, 4096, 5), (1 << 20,)])
def test_private_memory_is_given_back_and_reads_as_zeros(shape: tuple[int, ...]) -> None:
    pool = torch.ones(shape, dtype=torch.uint8)
    memory.give_back(pool)
    memory.take_again(pool)
    inside = pool.flatten()[8192:-8192]
    assert not inside.any()
    pool.fill_(7)
    assert int(pool.sum(dtype=torch.int64)) == 7 * pool.numel()
