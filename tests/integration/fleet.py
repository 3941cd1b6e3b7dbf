"""Workers, requests and prompts for tests of what Redis knows of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import redis.asyncio

from common.blocks import BlockKind, hash_blocks
from common.messages import HostTierTotals, KVLayout, Region, WorkerState, WorkerTotals
from common.store import RedisSettings, Store
from common.words import WorkerStatus
from gateway.placement.ledger import Ledger, PlacementRequest
from gateway.request.placement import Charged
from tests.integration.waiting import LIMIT_S

BLOCK_SIZE = 16
KIND = BlockKind(model="model", kv_dtype="float32", block_size=BLOCK_SIZE)
ROOT = KIND.root()
TTL_MS = 60_000
AT_MS = 4_102_444_800_000  # an instant of a clock that stands: queues shrink with time, and no charge expires


def patient(url: str) -> RedisSettings:
    """Settings with which a busy machine fails no test."""
    return RedisSettings(url=url, timeout_s=LIMIT_S)


def a_region(kind: BlockKind = KIND, *, num_blocks: int = 100, **shape: int) -> Region:
    """A pool with blocks of that kind."""
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8} | shape
    layout = KVLayout(num_blocks=num_blocks, block_size=kind.block_size, dtype=kind.kv_dtype, **sizes)
    return Region(transport="shm", incarnation=1, layout=layout, address={})


def a_worker(worker: str, *roles: str, kind: BlockKind = KIND, **changes: Any) -> WorkerState:
    """A ready worker that computes 1,000 prompt tokens a second and has room for 8 sequences in 100 blocks."""
    state = WorkerState(
        worker=worker,
        incarnation=1,
        roles=list(roles),
        status=WorkerStatus.READY,
        model="model",
        model_fingerprint=kind.model,
        tokenizer_fingerprint="tokenizer",
        vocab_size=100,
        max_model_len=2048,
        region=a_region(kind),
        free_blocks=100,
        max_sequences=8,
        prefill_tokens_per_s=1000.0,
    )
    return msgspec.structs.replace(state, **changes)


class FleetStore:
    """A worker's store and the gateway that hears it: what the worker says is in Redis when the call returns."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ledger = Ledger(store, timeout_s=LIMIT_S)

    async def register(self, state: WorkerState, *, ttl_ms: int = TTL_MS) -> bool:
        """Enter a worker; whether Redis did not know this incarnation."""
        told = await self._store._told(state.worker, state.incarnation)
        assert await self._ledger.enter([state], gateway="gateway", ttl_ms=ttl_ms) == []
        return told is None

    async def unregister(self, worker: str, incarnation: int) -> None:
        await self._ledger.leave(worker, incarnation)

    async def announce(self, worker: str, incarnation: int, added: list[bytes], removed: list[bytes]) -> None:
        """As a worker's process that was there all the time."""
        # This store speaks for many.
        self._store._turn = await self._store._told(worker, incarnation) or 0
        telling = asyncio.create_task(self._store.announce(worker, incarnation, added, removed))
        while not telling.done():
            await self._ledger.take_news([worker])
            await asyncio.wait([telling], timeout=0.001)
        await telling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def holding(store: FleetStore, worker: str, prompt: list[bytes], *, below: int, on_disk: int = 0) -> None:
    """Announce a prompt whose last blocks are in host memory, and the last of those in files."""
    await store.announce(worker, 1, prompt, [])
    for tier, count in ((b"\1", below), (b"\2", on_disk)):
        await store.announce(worker, 1, [digest + tier for digest in prompt[len(prompt) - count :]], [])


def a_holder(worker: str, role: str = "prefill", **figures: float) -> WorkerState:
    host = HostTierTotals(capacity_bytes=1 << 30, load_bytes_per_s=figures.pop("host_bytes_per_s", 1e9))
    disk = HostTierTotals(capacity_bytes=1 << 30, load_bytes_per_s=figures.pop("disk_bytes_per_s", 1e8))
    return a_worker(worker, role, totals=WorkerTotals(host=host, disk=disk), **figures)


async def live(raw: redis.asyncio.Redis) -> list[bytes]:
    """The workers with a lease."""
    names = sorted(await raw.smembers("baton:workers"))
    return [name for name in names if await raw.exists(b"baton:worker:" + name)]


async def two_and_two(store: FleetStore) -> None:
    """Register two workers of each role."""
    for state in (*(a_worker(f"p{n}", "prefill") for n in (0, 1)), *(a_worker(f"d{n}", "decode") for n in (0, 1))):
        await store.register(state, ttl_ms=TTL_MS)


async def doubt(raw: redis.asyncio.Redis, *workers: str) -> None:
    """Make the ledger doubt these workers, as when Redis was emptied while they worked."""
    for worker in workers:
        await raw.hdel(f"baton:worker:{worker}", "known")


async def now_ms(raw: redis.asyncio.Redis) -> int:
    """The server's time, to the second."""
    return int((await raw.time())[0]) * 1000


def a_request(request_id: str = "request", **changes: Any) -> PlacementRequest:
    values: dict[str, Any] = {
        "attempt": 1,
        "digests": [],
        "num_tokens": 64,
        "kind": KIND,
        "reserve_tokens": 96,
        "deadline_ms": TTL_MS,
    }
    return PlacementRequest(request_id=request_id, **(values | changes))


def a_prompt(*, blocks: int = 4) -> list[bytes]:
    """The digests of a prompt's blocks."""
    return hash_blocks(ROOT, range(blocks * BLOCK_SIZE), BLOCK_SIZE)


async def release(
    ledger: Ledger, request_id: str = "request", attempt: int = 1, *, stage: str = "all", workers: Sequence[str] = ()
) -> None:
    """Give one attempt's charges back."""
    stages = ("prefill", "decode") if stage == "all" else (stage,)
    assert await ledger.release([Charged(request_id, attempt, stages, tuple(workers))]) == 1
