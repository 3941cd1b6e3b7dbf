"""Who kills what computes it is given up after two workers; everybody else is served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.fake.faults import EXIT_CODE
from tests.chaos import checks
from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.load import Load
from tests.chaos.poison import FAULTS, KILLS, KILLS_DECODING, Supervisor, dead_jobs, poisoned, send

STREAMS = 24
DEADLINE_S = 120.0  # starting two workers again takes long on a busy machine
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    options = {**FAKE, "fake_step_ms": 20, "fake_faults": dict.fromkeys(NAMES, FAULTS)}
    async with ChaosCluster(folder, model=model, prefill=2, decode=2, **options) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("token", "role"), [(KILLS, "prefill"), (KILLS_DECODING, "decode")], ids=["prompt", "decoding"]
)
async def test_a_request_that_kills_its_worker_is_tried_twice_however_many_are_beside_it(
    token: int, role: str, cluster: ChaosCluster, oracle: Oracle
) -> None:
    load = Load(cluster.url, oracle, streams=STREAMS, first=10 * token, deadline_s=DEADLINE_S)
    async with Supervisor(cluster) as supervisor, load:
        await load.until_answered(STREAMS // 2)
        outcome = await send(cluster, poisoned(1, oracle, token))
        await load.until_answered(STREAMS // 2)
        others = await load.stop()
    assert (outcome.error, outcome.broken) == ("request_quarantined", "")
    assert [(name.partition("-")[0], code) for name, code in supervisor.deaths] == [(role, EXIT_CODE)] * 2
    assert (checks.wrong(others, oracle.answer), checks.unanswered(others), checks.broken(others)) == ([], [], [])
    assert set(checks.errors(others)) <= {"503 unavailable"}  # while both workers of a role are dead
    assert outcome.ask.body["prompt"] in await dead_jobs(cluster)
    await cluster.until_ready()
    assert await cluster.until_idle() == []
