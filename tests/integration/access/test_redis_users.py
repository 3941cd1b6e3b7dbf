"""Users of Redis against the real server: each role can do its work and nothing more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
import redis.exceptions

from common.store import RedisSettings, Store, connect_store
from gateway.placement.ledger import Ledger, function_libraries
from gateway.tenants.budgets import budgets_library
from tests.integration.access.deployment import REFUSED, Deployment
from tests.integration.fleet import a_request, a_worker
from tests.integration.waiting import eventually

# What a worker's user may do: read one key and write another, both its own.
OF_A_WORKER: list[tuple[object, ...]] = [
    *((f"FCALL baton4_{name} 0 decode-0 1").split() for name in ("enter", "leave", "news", "place", "release")),
    *((f"FCALL baton3_{name} 0 decode-0 1").split() for name in ("register", "unregister", "announce", "states")),
    ("FUNCTION", "LOAD", "REPLACE", "#!lua name=baton4\nredis.register_function('baton4_place', function() end)"),
    ("ZREM", "baton:ready:decode:kind", "prefill-0"),
    ("ZADD", "baton:ready:decode:kind", 0, "decode-0"),
    ("DEL", "baton:workers"),
    ("SADD", "baton:workers", "decode-0"),
    ("SREM", "baton:block:digest", "prefill-0@1"),
    ("SADD", "baton:block:digest", "decode-0@1"),
    ("EXPIRE", "baton:block:digest", 0),
    ("SET", "baton:rate:kind", 1),
    ("SET", "baton:home:decode-0", "x"),
    ("SET", "baton:home:prefill-0", "x"),
    ("HSET", "baton:worker:decode-0", "incarnation", "2"),
    ("HGET", "baton:worker:prefill-0", "record"),
    ("SET", "baton:told:decode-0", "1:5"),
    ("GET", "baton:told:prefill-0"),
    ("GET", "baton:news:decode-0"),
    ("SET", "baton:news:prefill-0", "x"),
    ("SET", "baton:news:decode-00", "x"),
    ("SET", "baton:news:decode-0:1", "x"),
    ("APPEND", "baton:news:decode-0", "x"),
    ("SETRANGE", "baton:news:decode-0", 1 << 28, "x"),
    ("MSET", "baton:news:decode-0", "x"),
    ("SMEMBERS", "baton:workers"),
    ("GET", "baton:load:decode:prefill-0"),
    ("GET", "baton:budget:acme"),
    ("FLUSHALL",),
]
REDIS_REFUSED: dict[str, list[tuple[object, ...]]] = {
    "gateway-0": [
        ("SET", "somebody:else", "x"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("EVAL", "return 1", 0),
        ("FUNCTION", "DELETE", "baton4"),
        ("ACL", "LIST"),
        ("GET", "somebody:else"),
    ],
    "decode-0": OF_A_WORKER,
    "planner": [
        ("FCALL", "baton4_place", 0, "r:1"),
        ("SMEMBERS", "baton:workers"),
        ("DEL", "baton:workers"),
        ("FLUSHALL",),
    ],
    "observer": [("FCALL", "baton4_place", 0), ("SMEMBERS", "baton:workers"), ("CONFIG", "GET", "*")],
}


@pytest.mark.parametrize("user", REDIS_REFUSED)
async def test_a_redis_user_may_do_nothing_beyond_its_role(deployment: Deployment, user: str) -> None:
    async with deployment.redis_as(user) as client:
        for command in REDIS_REFUSED[user]:
            with pytest.raises(redis.exceptions.ResponseError, match=REFUSED):
                await client.execute_command(*command)


async def test_a_gateway_s_user_counts_budgets(deployment: Deployment) -> None:
    async with deployment.redis_as("gateway-0") as client:
        await client.function_load(budgets_library(), replace=True)
        for left in (1, 0):
            answer = await client.fcall("baton2_budget_take", 0, "acme", f"r{left}", 5, 2, 100, 3, 60_000, 0)
            assert (answer[0], answer[2]) == (b"", left)
        assert await client.fcall("baton2_budget_settle", 0, "acme", "r0", 0, 5, 2, 0, 2, 100, 0) == 1


async def test_a_worker_s_blocks_come_into_the_index_through_a_gateway(deployment: Deployment) -> None:
    """With no more than what both users may do. Nobody takes what it says in another one's name, or without end."""
    async with as_user(deployment, "decode-0") as worker, as_user(deployment, "gateway-0") as gateway:
        ledger, state = Ledger(gateway), a_worker("decode-0", "decode", incarnation=7)
        await gateway.load_libraries()
        assert await ledger.enter([state], gateway="gateway-0") == []
        assert not await worker.register(state)
        telling = asyncio.create_task(worker.announce("decode-0", 7, [b"digest-0"], []))

        async def taken() -> bool:
            return await ledger.take_news(["decode-0", "prefill-0"])

        await eventually(taken)
        await telling
        assert (await ledger.place(a_request(digests=[b"digest-0"]))).matched_blocks_decode == 1
        await ledger.leave("decode-0", 7)


async def test_a_worker_may_not_fill_the_memory(deployment: Deployment) -> None:
    """It may write one key, and the server takes no argument longer than a few MB."""
    async with deployment.redis_as("decode-0") as client:
        with pytest.raises(redis.exceptions.RedisError):
            await client.set("baton:news:decode-0", b"x" * (5 << 20))


@contextlib.asynccontextmanager
async def as_user(deployment: Deployment, user: str) -> AsyncIterator[Store]:
    settings = RedisSettings(url=deployment.redis.address, credentials=deployment.users.redis_file(user))
    libraries = function_libraries() if user.startswith("gateway") else ()
    async with connect_store(settings, libraries=libraries) as store:
        yield store


async def test_redis_knows_nobody_without_a_password(deployment: Deployment) -> None:
    async with redis.asyncio.Redis.from_url(deployment.redis.address, protocol=2) as client:
        with pytest.raises(redis.exceptions.AuthenticationError):
            await client.execute_command("PING")
