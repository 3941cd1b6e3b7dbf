"""What breaks a device for good, and what it recovers from."""

from __future__ import annotations

import pytest

from worker.device.pipeline import MAX_FAILED_PASSES, DeviceHealth


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([], ""),
        (["odd", "odd"], ""),
        (["odd", "odd", "odd"], "3 passes in a row failed"),
        (["odd", "odd", "", "odd", "odd"], ""),
        (["CUDA out of memory"], ""),
        (["CUDA error: an illegal memory access\nCUDA kernel errors might be"], "RuntimeError: CUDA error: an illegal"),
        (["CUDA error: device-side assert", "", ""], "RuntimeError: CUDA error: device-side assert"),
    ],
)
def test_a_lost_context_or_failures_in_a_row_are_a_problem(events: list[str], problem: str) -> None:
    """An event is a failed pass's error, or "" for a pass with results."""
    health = DeviceHealth()
    for event in events:
        if event:
            health.failed(RuntimeError(event))
        else:
            health.passed()
    assert health.problem().startswith(problem)
    assert bool(health.problem()) == bool(problem)
    assert "\n" not in health.problem()


def test_a_pass_hangs_when_it_takes_longer_than_the_timeout() -> None:
    health = DeviceHealth(step_timeout_s=60.0)
    assert health.problem(waited_s=60.0) == ""
    assert health.problem(waited_s=61.0) == "a pass takes 61 s"


def test_a_cause_that_is_known_is_named_before_the_hang_that_follows_from_it() -> None:
    health = DeviceHealth(step_timeout_s=60.0)
    for _ in range(MAX_FAILED_PASSES):
        health.failed(RuntimeError("odd"))
    assert health.problem(waited_s=100.0) == "3 passes in a row failed"
