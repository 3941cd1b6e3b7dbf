"""A decode worker dies under the real engine: sampling, penalties, stop strings and several choices go on as if nothing was."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.cluster import ChaosCluster
from tests.chaos.real_model import DEMO, KINDS, REAL, disturbed, undisturbed


async def test_answers_of_the_demo_model_are_the_same_although_a_decode_worker_is_killed(tmp_path: Path) -> None:
    async with ChaosCluster(tmp_path, model=DEMO, prefill=1, decode=2, **REAL) as cluster:
        asked, expected = await undisturbed(cluster)
        assert any(choices[0].finish == "stop" for choices in expected.values())
        assert len({choices[0].text for choices in expected.values()}) >= len(KINDS)

        async def kill() -> None:
            await cluster.crash(await cluster.busiest("decode"))

        found = await disturbed(cluster, asked, expected, kill)
        assert found.moved > 0, "nobody was there"
        assert (found.different, found.unanswered, found.broken, found.errors) == ([], [], [], {})
