"""How long a step may take: less where prompts have workers of their own."""

from __future__ import annotations

import pytest

from worker.device import step_targets
from worker.host import WorkerSettings, step_target_ms


@pytest.mark.parametrize(
    ("roles", "target_ms"),
    [
        ([["prefill"], ["decode"]], 7.5),
        ([["decode", "prefill"], ["prefill"]], 7.5),
        ([["decode", "prefill"], ["decode", "prefill"]], 14.0),
        ([["decode"]], 14.0),  # whose prefill worker is gone
        ([], 14.0),
    ],
)
def test_steps_take_longer_only_while_nobody_computes_prompts_alone(roles: list[list[str]], target_ms: float) -> None:
    settings = WorkerSettings(served_model="m", tokenizer_fingerprint="t", step_target_ms=7.5, alone_target_ms=14.0)
    assert step_target_ms(settings, roles) == target_ms


def test_a_target_that_was_asked_for_holds_wherever_prompts_are_computed() -> None:
    settings = WorkerSettings(served_model="m", tokenizer_fingerprint="t", step_target_ms=9.0)
    assert step_target_ms(settings, []) == 9.0
    assert step_target_ms(settings, [["prefill"]]) == 9.0


def test_by_itself_the_target_is_told_by_what_the_device_needs_for_a_bare_step() -> None:
    larger = {(0, 256): 90.0, (1, 0): 39.0, (16, 0): 40.0, (16, 112): 44.0, (32, 0): 41.0}  # a model, or a slower card
    assert step_targets(larger) == pytest.approx((70.8, 140.0))
    assert step_targets({(4, 0): 50.0}) == pytest.approx((88.5, 175.0))  # no more sequences than four
    assert step_targets({}) == pytest.approx((7.08, 14.0))
