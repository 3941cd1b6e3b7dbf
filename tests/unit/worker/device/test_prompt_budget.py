"""How many prompt tokens may join a step: by numbers measured on an H200, and by what must hold for any numbers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.device.prompt_budget import PassLoad, PromptBudget
from worker.device.step_policy import StepPolicy, TargetRatios

POLICY = StepPolicy()
BUDGET = 4096
STEP = PassLoad(decoding=1)
TIMED = {(16, 0): 4.0, (16, 112): 5.0, (16, 176): 6.0, (16, 240): 8.0, (32, 96): 5.0}


def mixed(prompt_tokens: int, *, decoding: int = 1) -> PassLoad:
    return PassLoad(decoding=decoding, prompt_tokens=prompt_tokens)


def budget_of(
    target_ms: float, *, step_ms: float = 0.0, pass_ms: Mapping[tuple[int, int], float] | None = None
) -> PromptBudget:
    """`step_ms`: what the first step took; 0 = none was measured."""
    budget = PromptBudget(token_budget=BUDGET, target_ms=target_ms, pass_ms=pass_ms)
    if step_ms:
        budget.measured(STEP, step_ms / 1000)
    return budget


# -- by numbers --------------------------------------------------------------------------------------------------------


def test_what_fits_into_a_step_is_learnt_from_mixed_passes() -> None:
    budget = budget_of(8.0, step_ms=4.0)
    budget.measured(mixed(240), 0.010)  # 240 tokens add 6 ms
    assert budget.tokens() == 112  # 4 ms * 240 / 6 ms = 160 tokens: a pass of 128 with 16 slots to decode
    assert budget.tokens(decoding=17) == 96
    assert budget.tokens(decoding=100) == 128
    assert budget.local_tokens_per_s == pytest.approx(112 / (0.004 + 112 * 0.006 / 240))


@pytest.mark.parametrize(
    ("backlog", "tokens"), [(0, 112), (8192, 112), (8640, 112), (8644, 113), (12_192, 1000), (100_000, BUDGET)]
)
def test_a_backlog_above_the_limit_is_shared_out_over_four_passes(backlog: int, tokens: int) -> None:
    budget = budget_of(8.0, step_ms=4.0)
    budget.measured(mixed(240), 0.010)
    assert budget.tokens(backlog=backlog) == tokens


@pytest.mark.parametrize(("target", "tokens"), [(8.0, 2048), (0.0, BUDGET)])
def test_a_pass_that_others_may_come_to_wait_for_takes_50_ms_at_most(target: float, tokens: int) -> None:
    budget = budget_of(target)
    assert budget.tokens(decoding=0) == BUDGET  # not measured yet
    budget.measured(PassLoad(prompt_tokens=4100), 0.1)
    assert budget.tokens(decoding=0) == tokens  # 2,050 tokens take 50 ms


@pytest.mark.parametrize(
    ("step_ms", "tokens", "tokens_per_s"),
    [
        (0.0, 240, 30_000),  # 30 tokens a ms, against 29 and 22
        (4.5, 176, 1000 * 176 / 6.5),  # with contexts everything takes longer
        (7.5, 112, 0.5 * 112 / (0.5 * 0.0085 + 0.5 * 0.0075)),  # no pass is short enough
    ],
)
def test_passes_of_timed_sizes_are_filled_where_a_token_costs_least(
    step_ms: float, tokens: int, tokens_per_s: float
) -> None:
    budget = budget_of(8.0, step_ms=step_ms, pass_ms=TIMED)
    assert budget.tokens(decoding=3) == tokens
    assert budget.local_tokens_per_s == pytest.approx(tokens_per_s)


def test_sizes_that_were_not_timed_with_and_without_prompts_go_by_the_rate() -> None:
    assert budget_of(8.0, step_ms=7.5, pass_ms=TIMED).tokens(decoding=20) == 224


@pytest.mark.parametrize(
    ("step_ms", "mixed_ms", "taking", "tokens_per_s"),
    [
        (7.0, 8.0, 100, 112 / 0.008),  # the target
        (7.4, 8.4, 60, 0.6 * 112 / 0.008),  # six with prompts and four without take 8 ms in the mean
        (7.0, 9.0, 50, 0.5 * 112 / 0.008),  # longer than thought at first
        # every tenth would meet the target, but prompts must advance
        (7.9, 8.9, 50, 0.5 * 112 / (0.5 * 0.0089 + 0.5 * 0.0079)),
        (9.0, 10.0, 50, 0.5 * 112 / (0.5 * 0.010 + 0.5 * 0.009)),
    ],
)
def test_prompts_pause_where_the_fewest_tokens_make_steps_too_long(
    step_ms: float, mixed_ms: float, taking: int, tokens_per_s: float
) -> None:
    budget = budget_of(8.0, step_ms=step_ms, pass_ms={(16, 0): 4.0, (16, 112): 5.0})
    steps = run(budget, step_ms=step_ms, mixed_ms=mixed_ms, steps=400)
    assert 100 * steps.count(mixed_ms) / 400 == pytest.approx(taking, abs=1)
    assert budget.local_tokens_per_s == pytest.approx(tokens_per_s, rel=0.01)
    assert all(budget.tokens(backlog=20_000) for _ in range(10))  # a queue that grows serves nobody


def run(budget: PromptBudget, *, step_ms: float, mixed_ms: float, steps: int) -> list[float]:
    """What each of the steps took; each is planned before the one before it is over, as in the pipeline."""
    taken: list[float] = []
    flying = [plan(budget)]
    for _ in range(steps):
        flying.append(plan(budget))
        load = flying.pop(0)
        taken.append(mixed_ms if load.prompt_tokens else step_ms)
        budget.measured(load, taken[-1] / 1000)
    return taken


def plan(budget: PromptBudget) -> PassLoad:
    load = mixed(budget.tokens())
    budget.planned(decoding=1, prompt_tokens=load.prompt_tokens)
    return load


# -- whatever the numbers are ------------------------------------------------------------------------------------------

milliseconds = st.floats(0.01, 200.0)
targets = st.floats(0.5, 100.0)
loads = st.builds(
    PassLoad,
    decoding=st.integers(0, 300),
    prompt_tokens=st.integers(0, 5000),
    pairs=st.floats(0.0, 1e7),
).filter(lambda load: load.decoding + load.prompt_tokens > 0)
histories = st.lists(st.tuples(loads, milliseconds), max_size=20)
timings = st.dictionaries(
    st.tuples(st.sampled_from([16, 32, 64]), st.sampled_from([0, 48, 96, 112, 176, 240, 368])),
    milliseconds,
    max_size=12,
)


def told(
    target_ms: float, history: list[tuple[PassLoad, float]], **options: Mapping[tuple[int, int], float]
) -> PromptBudget:
    budget = budget_of(target_ms, **options)
    for load, ms in history:
        if load.decoding:
            budget.planned(decoding=load.decoding, prompt_tokens=load.prompt_tokens)
        budget.measured(load, ms / 1000)
    return budget


@given(targets, histories, timings, st.integers(0, 300), st.integers(0, 100_000), st.none() | st.integers(0, 100_000))
def test_a_budget_is_never_above_the_pass_s_tokens_and_a_large_backlog_always_gets_its_part(
    target_ms: float,
    history: list[tuple[PassLoad, float]],
    timed: dict[tuple[int, int], float],
    decoding: int,
    backlog: int,
    context: int | None,
) -> None:
    budget = told(target_ms, history, pass_ms=timed)
    tokens = budget.tokens(backlog, decoding=decoding, context=context)
    assert 0 <= tokens <= BUDGET
    assert tokens >= min(BUDGET, (backlog - POLICY.backlog.max_waiting_tokens) // POLICY.backlog.passes)
    assert budget.tokens(backlog + 1000, decoding=decoding, context=context) >= tokens
    assert budget.local_tokens_per_s >= 0


@given(targets, histories)
def test_credit_and_debt_are_bounded(target_ms: float, history: list[tuple[PassLoad, float]]) -> None:
    """What steps saved up long ago must not make many long ones, and one hiccup must not stop prompts for long."""
    budget = budget_of(target_ms)
    for load, ms in history:
        before = budget.credit_ms
        budget.measured(load, ms / 1000)
        assert -POLICY.turns.max_debt_ms <= budget.credit_ms <= POLICY.turns.max_credit_ms
        if not load.decoding:
            assert budget.credit_ms == before, "nobody waited for a token"


@given(targets, histories, timings, st.integers(1, 300))
def test_no_two_steps_with_prompts_follow_each_other_while_there_is_a_debt(
    target_ms: float, history: list[tuple[PassLoad, float]], timed: dict[tuple[int, int], float], decoding: int
) -> None:
    budget = told(target_ms, history, pass_ms=timed)
    budget.planned(decoding=decoding, prompt_tokens=100)
    assert (budget.tokens(decoding=decoding) == 0) == (budget.credit_ms < 0)
    budget.planned(decoding=decoding, prompt_tokens=0)
    assert budget.tokens(decoding=decoding) > 0, "prompts get every second step at least"


@given(targets, histories, st.integers(1, 300))
def test_steps_of_sizes_that_were_not_timed_fill_whole_tiles_or_take_the_fewest_tokens(
    target_ms: float, history: list[tuple[PassLoad, float]], decoding: int
) -> None:
    budget = told(target_ms, history)
    budget.planned(decoding=decoding, prompt_tokens=0)
    tokens = budget.tokens(decoding=decoding)
    is_whole = (tokens + POLICY.sizes.slots(decoding)) % POLICY.sizes.tile_tokens == 0
    assert is_whole or tokens in (POLICY.sizes.min_prompt_tokens, BUDGET)


@given(targets, histories, timings.map(lambda timed: {(16, 0): 4.0, (16, 112): 5.0} | timed))
def test_a_timed_size_is_chosen_that_meets_the_target_if_any_does(
    target_ms: float, history: list[tuple[PassLoad, float]], timed: dict[tuple[int, int], float]
) -> None:
    budget = told(target_ms, history, pass_ms=timed)
    budget.planned(decoding=1, prompt_tokens=0)
    predicted = budget.step_cost.predicted_ms(16, None)
    tokens = budget.tokens()
    assert (16, tokens) in timed
    if any(ms <= target_ms for ms in predicted.values()):
        assert predicted[tokens] <= target_ms
        cheaper = [other for other, ms in predicted.items() if other / ms > tokens / predicted[tokens]]
        assert all(predicted[other] > target_ms for other in cheaper)
    else:
        assert tokens == min(predicted)


@given(st.floats(2.0, 20.0), st.floats(1.0, 4.0), histories)
def test_a_worker_that_prefills_alone_computes_prompts_no_slower_than_beside_a_prefill_worker(
    bare_ms: float, slower: float, history: list[tuple[PassLoad, float]]
) -> None:
    """The looser of the two targets never leaves less to prompts; so it is for sizes that were not timed."""
    targets = TargetRatios().targets({(16, 0): bare_ms})
    assert targets.alone_ms > targets.shared_ms > bare_ms
    shared, alone = (told(target_ms, history) for target_ms in (targets.shared_ms, targets.alone_ms))
    for budget in (shared, alone):
        budget.measured(STEP, bare_ms / 1000)
        budget.measured(mixed(240), slower * bare_ms / 1000)
        budget.planned(decoding=1, prompt_tokens=0)
    assert alone.tokens() >= shared.tokens()


@given(step_ms=st.floats(1.0, 7.9), excess_ms=st.floats(0.1, POLICY.turns.max_debt_ms / 2))
def test_steps_meet_the_target_on_average_wherever_half_of_them_without_prompts_are_enough(
    step_ms: float, excess_ms: float
) -> None:
    """Two steps are planned before the first is measured: what both run up must fit into the debt, or it is forgotten."""
    target_ms, mixed_ms = 8.0, 8.0 + excess_ms
    budget = budget_of(target_ms, step_ms=step_ms, pass_ms={(16, 0): 4.0, (16, 112): 5.0})
    taken = run(budget, step_ms=step_ms, mixed_ms=mixed_ms, steps=400)
    if (step_ms + mixed_ms) / 2 <= target_ms:
        assert sum(taken) / len(taken) <= target_ms + 2 * POLICY.turns.max_debt_ms / 400
    else:
        assert taken.count(mixed_ms) == pytest.approx(200, abs=2)


# -- in stages ---------------------------------------------------------------------------------------------------------

ALONE = {(0, tokens): 1.0 + 0.02 * tokens for tokens in (256, 512, 1024, 2048, 8192)}  # ms: 1 and 20 us a token


@pytest.mark.parametrize(
    ("stages", "backlog", "launch_ms", "tokens"),
    [
        (1, 8192, 0.0, 8192),
        (2, 100, 0.0, 512),
        (2, 8192, 0.0, 640),
        (2, 2047, 0.0, 512),
        (2, 1100, 10.0, 1152),  # one pass
        (2, 100_000, 0.0, 2304),
        (4, 100_000, 0.0, 1408),
        (2, 8192, 10.0, 1024),  # a stage computes 1,000 tokens meanwhile
        (4, 8192, 10.0, 2048),
        (2, 10**9, 0.0, 8192),
    ],
)
def test_prompts_are_cut_so_that_all_stages_compute(stages: int, backlog: int, launch_ms: float, tokens: int) -> None:
    budget = PromptBudget(token_budget=8192, pass_ms=ALONE)
    budget.launch_s = launch_ms / 1000
    assert budget.in_stages(stages, backlog) == tokens


@pytest.mark.parametrize("backlog", [3000, 8192, 32_768])
def test_no_other_cut_is_sooner_by_much(backlog: int) -> None:
    """Turns of two stages, each with the fixed part of a pass: none of 512 tokens or more is sooner by a twentieth."""

    def ms(tokens: int) -> float:
        passes = -(-backlog // tokens)
        return (passes + 1) * (1.0 + 0.02 * backlog / passes) / 2

    budget = PromptBudget(token_budget=8192, pass_ms=ALONE)
    assert ms(budget.in_stages(2, backlog)) <= 1.05 * min(ms(tokens) for tokens in range(512, 8193, 128))


def test_nothing_is_cut_before_a_pass_was_timed() -> None:
    assert PromptBudget(token_budget=8192).in_stages(2, 8192) == 8192
