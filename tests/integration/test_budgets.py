"""Tenants' budgets in a real Redis or Valkey, over several gateways, and without it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from common.store import RedisSettings, Store, connect_store
from gateway.tenants.budgets import Grant, Limits, LocalBudgets, SharedBudgets, budgets_library
from services.runtime.servers import run_redis

LIMITS = Limits(requests_per_minute=60, tokens_per_minute=6000, max_concurrent=3)
PATIENT_S = 60.0  # a busy machine fails no test


class PatientStore:
    """A store whose calls may take long."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def call(self, function: str, *args: Any, timeout_s: float) -> Any:
        return await self._store.call(function, *args, timeout_s=PATIENT_S)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Any]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
    async with connect_store(
        RedisSettings(url=redis_url, timeout_s=PATIENT_S), libraries=(budgets_library(),)
    ) as store:
        yield PatientStore(store)


async def take(budgets: Any, name: str, limits: Limits = LIMITS, *, tokens: int = 10, tenant: str = "acme") -> Grant:
    return await budgets.take(tenant, limits, name, tokens=tokens, ttl_s=60.0)


async def test_requests_in_flight_are_counted_over_all_gateways(store: Any) -> None:
    here, there = SharedBudgets(store), SharedBudgets(store)
    grants = [await take(budgets, f"r{index}") for index, budgets in enumerate((here, there, here))]
    assert [grant.refused for grant in grants] == ["", "", ""]
    assert (await take(there, "r3")).refused == "concurrent"
    assert (await take(there, "r3", tenant="other")).refused == ""
    await here.settle(grants[0], used=10)
    assert (await take(there, "r3")).refused == ""


async def test_what_is_left_is_of_all_gateways_and_without_redis_of_this_one(store: Any) -> None:
    here, there = SharedBudgets(store), SharedBudgets(store)
    tokens = 1_000  # each, of 100 that come back a second
    grants = [await take(budgets, f"r{index}", tokens=tokens) for index, budgets in enumerate((here, there, here))]
    both = {"acme": LIMITS, "idle": Limits(requests_per_minute=5), "none": Limits(max_concurrent=1)}
    left = await there.left(both)
    used = left["acme"].used()
    assert {name: limit for name, (_, limit) in used.items()} == {"requests": 60, "tokens": 6000, "concurrent": 3}
    assert (used["concurrent"][0], 0 < used["requests"][0] <= 3, 0 < used["tokens"][0] <= 3 * tokens) == (3, True, True)
    assert left["idle"].used() == {"requests": (0, 5)}
    assert left["none"].used() == {"concurrent": (0, 1)}
    await here.settle(grants[0], used=10)
    assert (await there.left(both))["acme"].running == 2
    assert await here.left({}) == {}


async def test_a_burst_from_many_gateways_gets_a_minute_s_worth_and_no_more(store: Any) -> None:
    limits = Limits(requests_per_minute=20)
    gateways = [SharedBudgets(store) for _ in range(4)]
    grants = await asyncio.gather(*(take(gateways[index % 4], f"r{index}", limits) for index in range(60)))
    granted = [grant for grant in grants if not grant.refused]
    assert 20 <= len(granted) <= 21 + 60 // 3  # at most one more each 3 s, should this take long
    refused = [grant for grant in grants if grant.refused]
    assert {grant.refused for grant in refused} == {"requests"}
    assert all(0 < grant.retry_after_s <= 3.0 for grant in refused)
    assert all(grant.remaining_requests == 0 for grant in refused)


async def test_what_was_not_used_comes_back_and_what_was_used_more_is_owed(store: Any) -> None:
    budgets, limits = SharedBudgets(store), Limits(tokens_per_minute=6)  # a tenth of a token a second
    first = await take(budgets, "r0", limits, tokens=4)
    assert (first.remaining_tokens, first.tokens) == (2, 4)
    await budgets.settle(first, used=1)
    second = await take(budgets, "r1", limits, tokens=100)  # more than a minute's limit: takes a full bucket
    assert (second.refused, second.remaining_tokens) == ("tokens", 5)
    assert 0 < second.retry_after_s <= 10.0
    third = await take(budgets, "r2", limits, tokens=5)
    await budgets.settle(third, used=11)
    owing = await take(budgets, "r3", limits, tokens=1)
    assert (owing.refused, owing.remaining_tokens) == ("tokens", 0)
    assert owing.retry_after_s > 30
    await budgets.settle(await take(budgets, "x", limits, tokens=6, tenant="free"), used=None)
    assert (
        await take(budgets, "y", limits, tokens=6, tenant="free")
    ).refused == ""  # it was not admitted, so it was free


@pytest.mark.parametrize("seed", range(4))
async def test_lua_and_python_count_alike(store: Any, seed: int) -> None:
    """The same calls at the same instants of a made-up clock."""
    import random

    dice, now_ms = random.Random(seed), 1_000_000
    local = LocalBudgets(clock=lambda: now_ms / 1000)
    limits = Limits(
        requests_per_minute=dice.choice([0, 30]),
        tokens_per_minute=dice.choice([0, 600]),
        max_concurrent=dice.choice([0, 2]),
    )
    numbers = (limits.requests_per_minute, limits.tokens_per_minute)
    tenant, open_grants = f"t{seed}", list[Grant]()
    for index in range(120):
        now_ms += dice.choice([0, 100, 5_000])
        if open_grants and dice.random() < 0.5:
            grant = open_grants.pop(dice.randrange(len(open_grants)))
            used = dice.choice([None, 0, grant.tokens, grant.tokens + 30])
            spent = (1, grant.tokens, 0, 0) if used is None else (0, grant.tokens, used, 0)
            await local.settle(grant, used=used)
            await store.call(
                "baton2_budget_settle", tenant, grant.request_id, *spent, *numbers, now_ms, timeout_s=PATIENT_S
            )
            continue
        name, tokens = f"r{index}", dice.choice([1, 50, 5_000])
        grant = await local.take(tenant, limits, name, tokens=tokens, ttl_s=1e6)
        answer = await store.call(
            "baton2_budget_take",
            tenant,
            name,
            tokens,
            *numbers,
            limits.max_concurrent,
            10**9,
            now_ms,
            timeout_s=PATIENT_S,
        )
        assert answer[0].decode() == grant.refused
        assert int(answer[1]) == pytest.approx(grant.retry_after_s * 1000, abs=1)
        assert abs(int(answer[2]) - grant.remaining_requests) <= 1  # a rounded-down float
        assert abs(int(answer[3]) - grant.remaining_tokens) <= 1
        if not grant.refused:
            open_grants.append(grant)


async def test_keys_do_not_stay_for_ever(store: Any, redis_url: str) -> None:
    await take(SharedBudgets(store), "r0")
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        keys = [key async for key in client.scan_iter("baton:*:acme")]
        assert len(keys) == 4
        assert all([0 < await client.pttl(key) <= 120_000 for key in keys])


async def test_without_redis_each_gateway_counts_by_itself(tmp_path: Path) -> None:
    async with run_redis(data_dir=tmp_path) as server, connect_store(RedisSettings(url=server.url)) as store:
        budgets, limits = SharedBudgets(store), Limits(max_concurrent=1)
        server.process.send_signal(signal.SIGSTOP)
        try:
            grant = await take(budgets, "r0", limits)
            assert (grant.refused, grant.counted_here) == ("", True)
            assert (await take(budgets, "r1", limits)).refused == "concurrent"
            assert (await budgets.left({"acme": limits}))["acme"].used() == {"concurrent": (1, 1)}
            await budgets.settle(grant, used=5)
            assert (await take(budgets, "r1", limits)).refused == ""
        finally:
            server.process.send_signal(signal.SIGCONT)
