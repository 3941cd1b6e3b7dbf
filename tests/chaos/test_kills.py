"""The short form of the kill matrix; `make chaos` has all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
import pytest_asyncio
import redis.asyncio

from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.holdings import holdings
from tests.chaos.kills import Fault, crash, freeze, under_load

STREAMS = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    async with ChaosCluster(folder, model=model, prefill=2, decode=2, **FAKE, fake_step_ms=30) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "fault",
    [crash("decode"), crash("prefill"), pytest.param(freeze("decode", 5), marks=pytest.mark.long)],
    ids=["kill decode", "kill prefill", "stop decode"],
)
async def test_a_worker_that_dies_or_stands_still_costs_nobody_a_token(
    fault: Fault, cluster: ChaosCluster, oracle: Oracle
) -> None:
    verdict = await under_load(cluster, oracle, fault, streams=STREAMS, first=1000)
    assert (verdict.violations, verdict.broken, dict(verdict.errors)) == ([], [], {})


async def test_without_the_bus_streams_pause_and_newcomers_are_told(cluster: ChaosCluster, oracle: Oracle) -> None:
    verdict = await under_load(cluster, oracle, crash("nats"), streams=STREAMS, first=2000)
    assert (verdict.violations, verdict.broken) == ([], [])
    assert set(verdict.errors) <= {"503 unavailable"}


async def test_a_killed_gateway_leaves_nothing_behind(cluster: ChaosCluster, oracle: Oracle) -> None:
    verdict = await under_load(cluster, oracle, crash("gateway"), streams=STREAMS, first=3000)
    assert verdict.violations == []
    assert verdict.broken  # its own clients' connections: nobody can spare them that


async def test_a_planted_leak_is_seen(cluster: ChaosCluster) -> None:
    """After all that, what is held is what was held before: but for what is planted here."""
    await cluster.until_ready()
    before = await holdings(cluster)
    assert {f"memory of {name}" for name in cluster.pids} <= before.keys()
    assert (before["blocks held"], before["workers heard"]) == (0, 4)
    client = await nats.connect(cluster.nats.url)
    try:
        for number in range(3):
            await client.subscribe(f"baton.planted.{number}")
        await client.flush()
        async with redis.asyncio.Redis.from_url(cluster.redis.url) as store:
            await store.set("baton:placed:planted:1", "x", ex=60)
            held = await holdings(cluster)
    finally:
        await client.close()
    assert held["subscriptions in NATS"] - before["subscriptions in NATS"] == 3
    assert held["keys baton:placed in Redis"] - before.get("keys baton:placed in Redis", 0) == 1
