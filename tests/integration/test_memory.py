"""Notes of gateways for those that start later, in a real Redis."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from common.store import Store, connect_store
from gateway.placement.incumbents import Incumbents
from gateway.placement.memory import Memory
from tests.fakes.workers import a_worker
from tests.integration.fleet import patient

PATTERN = "baton:incumbents:*"


@pytest.fixture
async def plain_store(redis_url: str, raw: redis.asyncio.Redis):  # type: ignore[no-untyped-def]
    async with connect_store(patient(redis_url)) as store:
        yield store


async def test_a_gateway_of_the_same_models_reads_what_another_wrote(
    plain_store: Store, raw: redis.asyncio.Redis
) -> None:
    writer, incumbents = Memory(plain_store, ["a", "b"]), Incumbents()
    assert await writer.read() == {}
    incumbents.choose("weights of a", {"x": [a_worker("d0", "decode")]})
    writer.start(incumbents)
    async with asyncio.timeout(60):
        while not await writer.read():
            await asyncio.sleep(0.02)
    assert await Memory(plain_store, ["b", "a"]).read() == incumbents.marks
    assert await Memory(plain_store, ["a"]).read() == {}
    incumbents.choose("weights of b", {"y": [a_worker("d1", "decode")]})
    async with asyncio.timeout(60):  # a change comes at once
        while await writer.read() != incumbents.marks:
            await asyncio.sleep(0.02)
    [key] = [key async for key in raw.scan_iter(PATTERN)]
    assert await raw.pttl(key) > 0
    await writer.close()


@pytest.mark.parametrize("nonsense", [b"", b"\xff\xfe", b"[]", b'{"a": 1}', b"{" * 100_000])
async def test_nonsense_reads_as_nothing(plain_store: Store, raw: redis.asyncio.Redis, nonsense: bytes) -> None:
    memory = Memory(plain_store, ["a"])
    await plain_store.keep(memory._key, nonsense, ttl_s=60)
    assert await memory.read() == {}


async def test_another_type_in_redis_reads_as_nothing(plain_store: Store, raw: redis.asyncio.Redis) -> None:
    memory = Memory(plain_store, ["a"])
    await raw.hset(memory._key, "a", "b")
    assert await memory.read() == {}
