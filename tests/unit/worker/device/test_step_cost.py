"""What contexts add to a step, learnt from the passes of whole prompts."""

from __future__ import annotations

import math

import pytest

from worker.device.costs import LEAST_WAITS, UNKNOWN_WAIT_MS, WAITS_LAST, RowCost, StepCost, Waited, pairs_of
from worker.device.prompt_budget import PassLoad, PromptBudget
from worker.device.step_policy import Averaging, StepSizes

TIMED = {(16, 0): 4.0, (16, 112): 5.0, (16, 176): 6.0}


def test_attention_is_told_by_the_positions_before_a_part_and_by_whole_prompts() -> None:
    """Here 8,000 positions add 2 ms to a pass; a whole prompt of them adds 1 ms a pass on average."""
    budget = PromptBudget(token_budget=4096, target_ms=7.5, pass_ms=TIMED)
    budget.measured(PassLoad(decoding=1), 0.004)
    for start in range(0, 8000, 160):
        took_s = (6.0 + (start + 80) / 8000 * 2) / 1000
        budget.measured(PassLoad(decoding=1, prompt_tokens=160, pairs=pairs_of(start, start + 160)), took_s)
    assert budget.tokens(decoding=1, context=0) == 176
    assert budget.tokens(decoding=1, context=5000) == 176  # 7.25 ms
    assert budget.tokens(decoding=1, context=7000) == 112  # 7.75 would be too much
    assert budget.tokens(decoding=1) == 176  # whatever comes next
    assert budget.local_tokens_per_s == pytest.approx(176 / 0.007, rel=0.01)


def test_a_timed_step_takes_what_it_took_at_the_start_beside_the_bare_step_of_now() -> None:
    cost = StepCost(TIMED, StepSizes(), Averaging())
    assert cost.predicted_ms(16, None) == {112: 5.0, 176: 6.0}
    cost.add_bare(4.5, rows=16)
    assert cost.predicted_ms(16, None) == {112: 5.5, 176: 6.5}
    assert cost.predicted_ms(32, None) == {}


@pytest.mark.parametrize(("tokens", "rate"), [(240, 240 / 0.006), (200, 240 / 0.006), (112, 112 / 0.006), (63, 0.0)])
def test_the_end_of_a_prompt_counts_as_a_full_tile_and_a_few_tokens_count_for_nothing(tokens: int, rate: float) -> None:
    cost = StepCost({}, StepSizes(), Averaging())
    cost.add_bare(4.0, rows=16)
    cost.add_mixed(decoding=1, prompt_tokens=tokens, context=0.0, seconds=0.010)
    assert cost.prompt_tokens_per_s == pytest.approx(rate)


def test_more_tokens_never_take_less_time_whatever_the_clock_said() -> None:
    """A disturbance while a smaller step was timed: a larger one's time would else be told below nothing."""
    cost = StepCost({(16, 0): 50.0, (16, 112): 1.0, (16, 176): 60.0}, StepSizes(), Averaging())
    cost.add_bare(4.0, rows=16)
    assert cost.predicted_ms(16, None) == {112: 4.0, 176: 14.0}


def test_untimed_steps_are_known_by_what_finished_ones_took() -> None:
    rows = RowCost({}, Averaging())
    assert rows.ms(4) == 0.0
    rows.add(1, 10.0)
    assert rows.ms(1) == 10.0
    assert 10.0 < rows.ms(4) < 20.0  # not known: worth a try
    rows.add(4, 30.0)
    assert rows.ms(4) == 30.0
    assert 10.0 < rows.ms(2) < rows.ms(3) < 30.0


def test_timed_steps_take_as_long_as_their_graph_and_what_contexts_add() -> None:
    rows = RowCost({1: 4.0, 4: 4.2, 16: 5.0}, Averaging())
    assert (rows.ms(2), rows.ms(5), rows.ms(16)) == (4.2, 5.0, 5.0)
    rows.add(3, 5.2)
    assert (rows.ms(2), rows.ms(5)) == (5.2, 6.0)
    assert rows.ms(17) == math.inf


def test_a_step_that_waited_shows_the_wait_and_leaves_a_captured_steps_time() -> None:
    cost = StepCost(TIMED, StepSizes(), Averaging(), draft_ms={4: 1.0, 8: 1.5})
    for number in range(LEAST_WAITS):
        assert cost.waits.ms(5) == UNKNOWN_WAIT_MS + 1.5
        waited = Waited(100.0 if number == 1 else 9.0, device_ms=5.5, num_sequences=3)  # one was disturbed
        cost.add_bare(7.0, rows=16, waited=waited)
    assert cost.rows.ms(16) == 4.5  # contexts take half a millisecond
    assert cost.waits.ms(5) == pytest.approx(4.5)
    for _ in range(WAITS_LAST):
        cost.add_bare(4.5, rows=16)
    assert cost.waits.ms(5) == pytest.approx(4.5)
    cost.add_bare(4.5, rows=16)
    assert cost.waits.ms(9) == UNKNOWN_WAIT_MS + 1.5
