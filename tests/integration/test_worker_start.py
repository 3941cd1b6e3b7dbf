"""What a worker does before anybody may place work on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from common import subjects
from common.bus import NatsBus, NatsSettings, connect_bus
from common.messages import WorkerState, worker_state_decoder
from common.peers import Peers
from common.store import RedisSettings, connect_store
from common.words import WorkerStatus
from decode.role import DecodeRole
from engine.config import CacheConfig, EngineConfig
from engine.fake.engine import FakeEngine
from gateway.placement.ledger import function_libraries
from kvtransfer.shm import ShmTransport
from kvtransfer.transport import Transfers
from prefill.role import PrefillRole
from tests.integration.waiting import LIMIT_S
from tests.models import build_tiny_model
from worker.identity import Identity, Messenger
from worker.settings import ModelIdentity, WorkerSettings
from worker.worker import Worker


async def test_links_are_open_before_a_prefill_worker_is_ready_also_to_workers_heard_before_it_began(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "tiny", "llama")
    async with (
        connect_bus(NatsSettings(url=nats_url), name="start") as bus,
        new_worker(bus, redis_url, model, "start-decode") as decode,
        new_worker(bus, redis_url, model, "start-prefill") as prefill,
    ):
        told: asyncio.Queue[WorkerState] = asyncio.Queue()
        heard: asyncio.Queue[WorkerState] = asyncio.Queue()
        beats = await bus.subscribe(subjects.heartbeat("start-prefill"), worker_state_decoder, told.put_nowait)
        others = await bus.subscribe(subjects.heartbeat("start-decode"), worker_state_decoder, heard.put_nowait)
        stopping = asyncio.Event()
        async with asyncio.timeout(LIMIT_S):
            decoding = asyncio.create_task(decode.run(stopping))
            prefill.context.messenger.peers.saw(await heard.get())  # before `run` asks to be told of those who join
            running = asyncio.create_task(prefill.run(stopping))
            first = await told.get()
        stopping.set()
        await asyncio.gather(running, decoding)
        await beats.close()
        await others.close()

    assert first.status == WorkerStatus.READY
    assert first.link_bytes_per_s > 0


@asynccontextmanager
async def new_worker(bus: NatsBus, redis_url: str, model: Path, name: str) -> AsyncIterator[Worker]:
    """A worker in this process, not yet running."""
    transport, role = ShmTransport(), name.rpartition("-")[2]
    engine = FakeEngine(
        EngineConfig(model=model, cache=CacheConfig(kv_memory_bytes=1 << 20)), allocate=transport.allocate
    )
    peers = Peers()
    async with connect_store(RedisSettings(url=redis_url), libraries=function_libraries()) as store:
        identity = Identity(name, 7)
        worker = Worker(
            messenger=Messenger(identity=identity, bus=bus, peers=peers),
            store=store,
            engine=engine,
            transfers=Transfers(
                transport=transport, region=await transport.open(engine.kv, engine.layout, identity.incarnation)
            ),
            settings=WorkerSettings(served=ModelIdentity("tiny", ""), max_batch_tokens=64, max_sequences=4),
        )
        worker.attach(DecodeRole(worker.context), active=role == "decode")
        worker.attach(PrefillRole(worker.context, max_requests=4), active=role == "prefill")
        try:
            yield worker
        finally:
            await transport.close()
