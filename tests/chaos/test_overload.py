"""Far more requests than can be served: who comes in is answered in time, who doesn't is told when to come back."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.overload import CAPACITY, SLOW, offer, quantile

GROWS_MB = 64  # of one process


async def test_who_is_let_in_is_answered_and_who_isn_t_is_told_when_to_come_back(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with ChaosCluster(tmp_path, model=model, prefill=1, decode=1, **FAKE, **SLOW) as cluster:
        calm = await offer(cluster, oracle, rate=0.6 * CAPACITY, seconds=3, first=0)
        flood = await offer(cluster, oracle, rate=10 * CAPACITY, seconds=5, first=1000)
        assert (calm.wrong, flood.wrong) == ([], [])
        assert calm.goodput > 0
        assert flood.refused, "nobody was refused: this was no overload"
        assert flood.goodput > 0
        assert flood.without_retry_after == 0
        told = {
            when: flood.metrics[f'baton_refusal_seconds_count{{when="{when}"}}']
            for when in ("at once", "after waiting")
        }
        assert sum(told.values()) == len(flood.refused)
        grown = {name: peak - calm.memory_mb[name] for name, peak in flood.memory_mb.items()}
        assert {name: megabytes for name, megabytes in grown.items() if megabytes > GROWS_MB} == {}
        assert await cluster.until_idle() == []


def test_a_quantile_is_the_bound_of_its_bucket_over_all_labels() -> None:
    metrics = {
        'x_bucket{le="0.1",when="a"}': 98.0, 'x_bucket{le="1.0",when="a"}': 98.0, 'x_bucket{le="+Inf",when="a"}': 98.0,
        'x_bucket{le="0.1",when="b"}': 0.0, 'x_bucket{le="1.0",when="b"}': 1.0, 'x_bucket{le="+Inf",when="b"}': 2.0,
        'y_bucket{le="9.0"}': 500.0,
    }  # fmt: skip
    assert [quantile(metrics, "x", share) for share in (0.5, 0.98, 0.99, 1.0)] == [0.1, 0.1, 1.0, float("inf")]
    assert quantile({}, "x", 0.99) == 0.0
