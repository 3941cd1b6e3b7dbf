"""The short form of an upgrade: half of the processes are the last release's, then a decode worker is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.asks import Oracle
from tests.chaos.cluster import FAKE
from tests.chaos.upgrade import LAST, HistoryIsMissingError, UpgradeCluster, check_out, roll

OLD = ("gateway", "prefill-0", "decode-0")


@pytest.mark.parametrize("transport", ["shm", pytest.param("ucx", marks=pytest.mark.long)])
async def test_the_last_release_and_this_one_serve_together(
    transport: str, model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    try:
        code = check_out(LAST, tmp_path / "code")
    except HistoryIsMissingError as error:
        pytest.skip(str(error))
    options = {"prefill": 2, "decode": 2, **FAKE, "fake_step_ms": 20, "transport": transport}
    cluster = UpgradeCluster(tmp_path / "cluster", model=model, code=code, old=OLD, **options)
    async with cluster:
        verdict = await roll(cluster, oracle, ["decode-0"], old=False, streams=16, first=30_000)
        assert cluster.old == {"gateway", "prefill-0"}
    assert (verdict.violations, verdict.broken, dict(verdict.errors)) == ([], [], {})
