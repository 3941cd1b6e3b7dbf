"""How long a step may take: less where prompts have workers of their own."""

from __future__ import annotations

import pytest

from worker.device.step_policy import StepTargets, TargetRatios


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
    assert StepTargets(7.5, 14.0).chosen_ms(roles) == target_ms


def test_a_target_that_was_asked_for_holds_wherever_prompts_are_computed() -> None:
    assert StepTargets(9.0).chosen_ms([]) == 9.0
    assert StepTargets(9.0).chosen_ms([["prefill"]]) == 9.0


@pytest.mark.parametrize(
    ("pass_ms", "shared_ms", "alone_ms"),
    [
        # a larger model, or a slower card
        ({(0, 256): 90.0, (1, 0): 39.0, (16, 0): 40.0, (16, 112): 44.0, (32, 0): 41.0}, 70.8, 140.0),
        ({(4, 0): 50.0}, 88.5, 175.0),  # no more sequences than four
        ({}, 7.08, 14.0),
    ],
)
def test_by_itself_the_target_is_told_by_what_the_device_needs_for_a_bare_step(
    pass_ms: dict[tuple[int, int], float], shared_ms: float, alone_ms: float
) -> None:
    targets = TargetRatios().targets(pass_ms)
    assert targets.shared_ms == pytest.approx(shared_ms)
    assert targets.alone_ms == pytest.approx(alone_ms)
