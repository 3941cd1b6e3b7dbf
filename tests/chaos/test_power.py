"""Batches that were acknowledged survive a power cut of the broker as it is shipped, and do not with NATS's default."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.asks import Oracle
from tests.chaos.power import LINES, can_mount, cut_power

pytestmark = pytest.mark.skipif(not can_mount(), reason="emulating a power cut needs root and loop devices")


async def test_every_acknowledged_line_has_one_result_after_power_cuts(
    tmp_path: Path, model: Path, oracle: Oracle
) -> None:
    found = await cut_power(tmp_path / "run", model=model, oracle=oracle, cuts=2, always=True)
    assert found.acknowledged == 2 * LINES
    assert (found.lost, found.again, found.wrong) == (0, 0, 0)
    assert 0 < found.done_before[1] < LINES, "the second batch was not running when the power failed"


async def test_the_default_loses_what_it_acknowledged(tmp_path: Path, model: Path, oracle: Oracle) -> None:
    found = await cut_power(tmp_path / "run", model=model, oracle=oracle, cuts=1, always=False)
    assert found.lost > 0, "the negative control kept everything: the cut is none"
