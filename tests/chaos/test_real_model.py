"""A decode worker dies under the real engine: sampling, penalties, stop strings and several choices go on as if nothing was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.asks import Seen
from tests.chaos.cluster import ChaosCluster, FaultDidNotHappenError
from tests.chaos.real_model import DEMO, KINDS, REAL, ROUNDS, disturbed, undisturbed
from tests.unit.engine.families import hybrids


async def test_answers_of_the_demo_model_are_the_same_although_a_decode_worker_is_killed(tmp_path: Path) -> None:
    expected = await _kill_a_decode_worker(tmp_path, DEMO)
    assert any(choices[0].finish == "stop" for choices in expected.values())
    assert len({choices[0].text for choices in expected.values()}) >= len(KINDS)


@pytest.mark.long
async def test_so_are_those_of_a_model_that_keeps_states(tmp_path: Path) -> None:
    await _kill_a_decode_worker(tmp_path, hybrids.QWEN_3_5.build(tmp_path / "model"))


async def _kill_a_decode_worker(folder: Path, model: Path) -> dict[str, dict[int, Seen]]:
    """Kill one that has streams, while all are under way; returns what they answer undisturbed."""
    async with ChaosCluster(folder, model=model, prefill=1, decode=2, **REAL) as cluster:
        asked, expected = await undisturbed(cluster)
        victim: str

        async def kill() -> None:
            nonlocal victim
            victim = await cluster.busiest("decode")
            await cluster.crash(victim)

        for _ in range(ROUNDS):
            victim = ""
            found = await disturbed(cluster, asked, expected, kill)
            assert (found.different, found.unanswered, found.broken, found.errors) == ([], [], [], {})
            if found.moved:
                return expected
            if victim:
                await cluster.again(victim)
    raise FaultDidNotHappenError(f"no stream was left on the worker that died, {ROUNDS} times")
