"""The short form of the cut links; `make chaos` has all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE, FaultDidNotHappenError
from tests.chaos.kills import under_load
from tests.chaos.links import Link, LinkedCluster, Part

STREAMS = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LinkedCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    async with LinkedCluster(folder, model=model, prefill=1, decode=2, **FAKE, fake_step_ms=20) as cluster:
        yield cluster


async def test_a_worker_without_the_bus_past_its_fence_costs_nobody_a_token(
    cluster: LinkedCluster, oracle: Oracle
) -> None:
    verdict = await under_load(cluster, oracle, Part("decode", "nats", "hold", 5), streams=STREAMS, first=4000)
    assert (verdict.violations, verdict.broken, dict(verdict.errors)) == ([], [], {})


async def test_a_gateway_cut_off_from_the_bus_says_so(cluster: LinkedCluster, oracle: Oracle) -> None:
    verdict = await under_load(cluster, oracle, Part("gateway", "nats", "cut", 1), streams=STREAMS, first=5000)
    assert (verdict.violations, verdict.broken) == ([], [])
    assert set(verdict.errors) <= {"503 unavailable"}


async def test_a_link_that_nobody_uses_proves_nothing() -> None:
    link = Link(upstream=1)
    await link.harm("hold")
    with pytest.raises(FaultDidNotHappenError):
        await link.heal()
