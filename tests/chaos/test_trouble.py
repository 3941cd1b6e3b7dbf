"""Devices that break and workers that are told to go: nobody loses a token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.trouble import FAULTY, device_trouble, moved, rolling_restart

STREAMS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    patient = ("--drain-s", "20")  # a gateway can't hand its clients over: their answers are waited for
    options = {
        **FAKE,
        "fake_step_ms": 20,
        "step_timeout_s": 2,
        "gateways": 2,
        "gateway_options": patient,
        "drain_s": 0.1,  # five tokens: answers of up to 400 outlast it, also where the machine is busy
    }
    faulty = dict.fromkeys(("prefill-0", "decode-0"), FAULTY)
    async with ChaosCluster(folder, model=model, prefill=2, decode=2, fake_faults=faulty, **options) as cluster:
        yield cluster


@pytest.mark.parametrize("kind", ["hang", "fail-decoding", "oom"])
async def test_a_worker_whose_device_breaks_leaves_and_its_requests_move(
    kind: str, cluster: ChaosCluster, oracle: Oracle
) -> None:
    verdict = await device_trouble(cluster, oracle, kind, streams=STREAMS, first=10_000 + 100 * len(kind))
    assert (verdict.violations, verdict.broken, dict(verdict.errors)) == ([], [], {})


async def test_a_rolling_restart_loses_nothing_also_of_answers_that_take_longer_than_the_grace(
    cluster: ChaosCluster, oracle: Oracle
) -> None:
    names = ["prefill-1", "decode-1", "gateway-1"]
    verdict = await rolling_restart(cluster, oracle, names, streams=STREAMS, first=20_000, longest_answer=400)
    assert (verdict.violations, verdict.broken, dict(verdict.errors)) == ([], [], {})
    assert cluster.faults[-3:] == [f"SIGTERM {name}" for name in names]
    assert moved(cluster) > 0
