"""The short form of the kill matrix; `make chaos` has all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.kills import crash, under_load
from tests.models import build_tiny_model

STREAMS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    async with ChaosCluster(folder, model=model, prefill=2, decode=2, **FAKE, fake_step_ms=30) as cluster:
        yield cluster


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_killed_worker_costs_nobody_a_token(role: str, cluster: ChaosCluster, oracle: Oracle) -> None:
    verdict = await under_load(cluster, oracle, crash(role), streams=STREAMS, first=1000 * len(role))
    assert verdict.violations == []
    assert verdict.broken == []
    assert not verdict.errors
