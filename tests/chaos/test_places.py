"""A tenant that fills every place of the decode batch keeps nobody else waiting, and loses no token by that."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.asks import Oracle
from tests.chaos.cluster import ChaosCluster
from tests.chaos.places import crowd, slow


async def test_long_streams_make_room_for_another_tenant_and_go_on(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async with ChaosCluster(tmp_path / "cluster", model=model, **slow(tmp_path, places=2, step_ms=20)) as cluster:
        seen = await crowd(cluster, oracle, streams=6, tokens=300, shorts=3)
        assert seen.wrong == []
        preempted = seen.metrics['baton_gateway_events_total{event="preemptions",model_name="tiny"}']
        assert preempted > 0
        assert await cluster.until_idle() == []
