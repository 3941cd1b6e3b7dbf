"""A second process under a worker's name, of a release that asks nobody: no request is lost or blamed for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE
from tests.chaos.kills import Verdict, judge
from tests.chaos.load import Load
from tests.chaos.upgrade import KNOWN_KINDS, LAST, HistoryIsMissingError, UpgradeCluster, check_out

STREAMS = 12
CONTESTED_WITHIN_S = 150.0  # the other one loads torch first


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_worker_under_another_ones_name_costs_no_request(
    name: str, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    try:
        code = check_out(LAST, tmp_path / "code")
    except HistoryIsMissingError as error:
        pytest.skip(str(error))
    options = {"prefill": 2, "decode": 2, **FAKE, "fake_step_ms": 20}
    cluster = UpgradeCluster(tmp_path / "cluster", model=model, code=code, old=(), **options)
    async with cluster:
        verdict = await beside_another(cluster, oracle, name)
    assert (verdict.violations, verdict.broken, dict(verdict.errors)) == ([], [], {})


async def beside_another(cluster: UpgradeCluster, oracle: Oracle, name: str) -> Verdict:
    """Let a process of the last release take the name of a running worker for a while, under load."""
    ours = cluster.processes[name]
    async with Load(cluster.balance, oracle, streams=STREAMS, first=60_000, kinds=KNOWN_KINDS) as load:
        await load.until_answered(STREAMS // 2)
        began = time.monotonic()
        cluster.old.add(name)
        await cluster.start(name)
        async with asyncio.timeout(CONTESTED_WITHIN_S):
            while name not in cluster.peers.contested:
                await asyncio.sleep(0.05)
        await load.until_answered(2 * STREAMS)
        await cluster.crash(name)
        cluster.old.discard(name)
        cluster.processes[name] = ours
        if ours.returncode is not None:  # by its number the other one was the older
            await cluster.again(name)
        await cluster.until_ready()
        await load.until_answered(STREAMS)
        outcomes = await load.stop()
    return judge("a name twice", outcomes, oracle, held=await cluster.until_idle(), began=began)
