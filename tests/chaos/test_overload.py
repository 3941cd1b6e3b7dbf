"""Far more requests than can be served: who comes in is answered in time, who doesn't is told when to come back."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.overload import offer

SLOW = {**FAKE, "fake_step_ms": 2, "fake_token_us": 2000}  # 100 prompt tokens take 0.2 s: five requests a second


async def test_who_is_let_in_is_answered_and_who_isn_t_is_told_when_to_come_back(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with ChaosCluster(tmp_path, model=model, prefill=1, decode=1, **SLOW) as cluster:
        calm = await offer(cluster, oracle, rate=3, seconds=3, first=0)
        flood = await offer(cluster, oracle, rate=50, seconds=5, first=1000)
        assert (calm.wrong, flood.wrong) == ([], [])
        assert calm.goodput > 0
        assert flood.refused, "nobody was refused: this was no overload"
        assert flood.goodput > 0
        assert flood.without_retry_after == 0
        assert flood.memory_mb < calm.memory_mb + 200
        assert await cluster.until_idle() == []
