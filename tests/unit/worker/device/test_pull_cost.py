"""The expected time of a pull: by its link until it is measured, and again when nobody pulled for long."""

from __future__ import annotations

import pytest

from worker.device.costs import PULLS_LAST_S, PullCost


def test_a_slow_pull_keeps_nobody_from_pulling_for_ever() -> None:
    cost = PullCost(0.004)
    assert cost.bytes_per_s([], 0.0) == 1e9
    assert cost.bytes_per_s([0.0, 8e9, 2e9], 0.0) == 2e9
    cost.add(1_000, 10.004, 0.0)
    assert cost.bytes_per_s([2e9], 1.0) == pytest.approx(100)
    assert cost.seconds(1_000, [2e9], 1.0) == pytest.approx(10.004)
    assert cost.bytes_per_s([2e9], PULLS_LAST_S) == 2e9


def test_newer_pulls_count_more() -> None:
    cost = PullCost(0.0)
    for at, rate in enumerate((1e6, 2e6)):
        cost.add(int(rate), 1.0, float(at))
    assert cost.bytes_per_s([], 2.0) == pytest.approx(1.3e6)
