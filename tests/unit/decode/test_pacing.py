"""The order of prompts, and the size of a pass, by goals and slack."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from benchmarks.load.device import PassCosts
from common.messages import NO_GOAL, Goal
from decode.pacing import Due, GoalPacing, best_size, lateness
from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from engine.step.graphs import MIXED_GRAPHS
from tests.unit.decode.scheduling import BLOCK, land, make_request
from worker.device.prompt_budget import PromptBudget

GOAL = Goal(ttft_ms=200.0, ttft_ms_per_token=0.1, tpot_ms=20.0)
PASS_S = {tokens: 0.004 + 0.00003 * tokens for tokens in (128, 256, 512, 1024, 2048)}


class Worker:
    """A scheduler in simulated time."""

    def __init__(self, *, target_ms: float = 14.0, follows_goals: bool = True) -> None:
        self.now = 100.0
        self.budget = PromptBudget(token_budget=8192, target_ms=target_ms, pass_ms=PassCosts.of("bf16").pass_ms())
        self.budget.follows_goals = follows_goals
        self.pacing = GoalPacing(self.budget, clock=lambda: self.now)
        self.pool = BlockPool(num_blocks=40_000, block_size=BLOCK)
        self.scheduler = DecodeScheduler(pool=self.pool, max_sequences=256, max_model_len=40_000, pacing=self.pacing)
        self._salt = 0

    def request(self, name: str, *, prompt: int, goal: Goal = GOAL, ago: float = 0.0) -> DecodeRequest:
        self._salt += 31
        request = make_request(name, prompt=prompt, max_tokens=100, salt=self._salt)
        request.job = msgspec.structs.replace(request.job, goal=goal)
        request.received_at = request.began_at = self.now - ago
        return request

    def enqueue(self, name: str, *, prompt: int, goal: Goal = GOAL, ago: float = 0.0) -> DecodeRequest:
        request = self.request(name, prompt=prompt, goal=goal, ago=ago)
        self.scheduler.enqueue(request)
        return request

    def step(self, budget: int = 8192) -> dict[str, int]:
        chunks = self.scheduler.plan(budget)
        land(self.scheduler, self.pool, chunks)
        return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}

    def stream(self, name: str, *, ahead_s: float) -> DecodeRequest:
        """A stream that is so far ahead of its pace."""
        request = self.enqueue(name, prompt=32)
        self.step()
        request.first_token_at = self.now + ahead_s
        return request


def test_a_short_prompt_overtakes_a_long_one_that_is_being_computed() -> None:
    worker = Worker()
    worker.stream("s", ahead_s=0.0)
    worker.enqueue("long", prompt=20_000)
    assert set(worker.step()) == {"s", "long"}
    worker.now += 0.01
    worker.enqueue("short", prompt=100)
    assert list(worker.step())[:2] == ["s", "short"]


def test_what_is_cached_of_a_prompt_is_no_work_in_its_turn() -> None:
    worker = Worker()
    first = worker.enqueue("first turn", prompt=6000)
    while worker.step(2048):
        if first.sequence.num_generated:
            break
    worker.scheduler.remove(first)
    again, other = worker.request("next turn", prompt=6000), worker.request("other", prompt=1000)
    again.sequence.token_ids[:] = first.sequence.token_ids[:6000]
    assert worker.pacing.turn(other) < worker.pacing.turn(again)
    for request in (other, again):
        worker.scheduler.enqueue(request)
    assert again.num_to_compute <= BLOCK < other.num_to_compute == 1000
    assert worker.pacing.turn(again) < worker.pacing.turn(other)
    assert next(iter(worker.step(1100))) == "next turn"


def test_a_plan_ranks_each_prompt_once() -> None:
    worker = Worker()
    worker.stream("s", ahead_s=0.0)
    for number in range(5):
        worker.enqueue(f"p{number}", prompt=3000)
    ranked = list[str]()
    turn = worker.pacing.turn
    worker.pacing.turn = lambda request: ranked.append(request.id) or turn(request)
    worker.step()
    worker.step()
    assert sorted(ranked) == sorted(2 * [f"p{number}" for number in range(5)])


def test_a_long_prompt_goes_first_when_it_has_waited() -> None:
    worker = Worker()
    long, short = worker.request("long", prompt=8000, ago=3.0), worker.request("short", prompt=100)
    assert worker.pacing.turn(long) < worker.pacing.turn(short)


def test_short_prompts_that_keep_coming_never_starve_a_long_one() -> None:
    worker = Worker()
    worker.stream("s", ahead_s=0.0)
    worker.enqueue("long", prompt=6000)
    tokens = 0
    for number in range(200):
        worker.now += 0.02
        worker.enqueue(f"short {number}", prompt=500)
        tokens += worker.step().get("long", 0)
    assert tokens >= 6000


@pytest.mark.parametrize("goal", [Goal(ttft_ms=1e-323, tpot_ms=1e-323), Goal(ttft_ms=0.0, tpot_ms=0.0)], ids=str)
def test_a_goal_that_nobody_reaches_is_no_priority_and_no_error(goal: Goal) -> None:
    worker = Worker()
    worker.stream("s", ahead_s=0.1)
    hasty = worker.enqueue("hasty", prompt=3000, goal=goal)
    usual = worker.request("usual", prompt=3000)
    assert worker.step().keys() == {"s", "hasty"}
    assert worker.pacing.turn(hasty) > worker.pacing.turn(usual) - 1


def test_a_long_goal_ranks_before_the_lowest_tier() -> None:
    worker = Worker()
    patient = worker.request("patient", prompt=100, goal=Goal(ttft_ms=60_000.0))
    lowest = worker.request("lowest", prompt=100, goal=NO_GOAL, ago=2.0)
    lowest.job = msgspec.structs.replace(lowest.job, priority=-1)
    assert worker.pacing.turn(patient) < worker.pacing.turn(lowest)


def test_the_lowest_tier_ages_from_its_claim() -> None:
    worker = Worker()
    held = worker.request("held back by the gateway", prompt=100, goal=NO_GOAL)
    held.job = msgspec.structs.replace(held.job, priority=-1)
    held.received_at -= 60.0
    assert worker.pacing.turn(held) > worker.pacing.turn(worker.request("fresh", prompt=100))


def test_a_gateway_that_sends_no_goals_has_the_usual_one() -> None:
    worker = Worker()
    old, new = worker.request("old", prompt=100, goal=NO_GOAL), worker.request("new", prompt=100, ago=-5.0)
    assert worker.pacing.turn(old) < worker.pacing.turn(new)


def test_one_that_is_late_already_yields_to_one_that_can_be_in_time() -> None:
    worker = Worker()
    late, punctual = worker.request("late", prompt=600, ago=0.3), worker.request("punctual", prompt=600, ago=0.15)
    assert worker.pacing.turn(punctual) < worker.pacing.turn(late)
    worker.now += 10.0  # both are late
    assert worker.pacing.turn(late) < worker.pacing.turn(punctual)


def test_who_wants_it_sooner_goes_first_and_who_wants_nothing_last() -> None:
    worker = Worker()
    wants = [Goal(ttft_ms=100.0), Goal(ttft_ms=1000.0), NO_GOAL]
    turns = [worker.pacing.turn(worker.request("r", prompt=300, goal=goal)) for goal in wants]
    assert turns == sorted(turns)


def test_a_comfortable_step_is_enough_while_nobody_would_be_late() -> None:
    worker = Worker()
    for number in range(4):
        worker.stream(f"s{number}", ahead_s=5.0)
    worker.enqueue("prompt", prompt=900, goal=Goal(ttft_ms=1000.0, tpot_ms=20.0))
    assert worker.step()["prompt"] <= 512


@pytest.mark.parametrize("num_streams", [3, 20, 60, 90, 200])
def test_beside_streams_a_usual_pass_is_one_that_is_captured(num_streams: int) -> None:
    worker = Worker()
    worker.budget.launch_s = 0.016
    for number in range(num_streams):
        worker.stream(f"s{number}", ahead_s=0.0)
    worker.enqueue("prompt", prompt=3000, goal=Goal(ttft_ms=9000.0, tpot_ms=20.0))
    tokens = worker.step()["prompt"]
    slots = next(slots for slots in MIXED_GRAPHS if slots >= num_streams)
    assert tokens >= 256
    assert slots + tokens in MIXED_GRAPHS[slots]


@pytest.mark.parametrize(("ahead_s", "most"), [(5.0, 2048), (-5.0, 512)])
def test_streams_that_are_ahead_wait_for_prompts_that_would_be_late(ahead_s: float, most: int) -> None:
    worker = Worker()
    worker.stream("s", ahead_s=ahead_s)
    for number in range(8):
        worker.enqueue(f"p{number}", prompt=2000, ago=0.1)
    tokens = sum(worker.step().values()) - 1
    assert most / 2 < tokens <= most


def test_a_target_that_was_asked_for_is_kept_whatever_goals_say() -> None:
    worker = Worker(target_ms=10.0, follows_goals=False)
    worker.stream("s", ahead_s=5.0)
    for number in range(2):
        worker.enqueue(f"p{number}", prompt=2000, ago=0.1)
    assert sum(worker.step().values()) < 400


def test_the_chosen_pass_is_a_given_one_within_its_bounds_and_no_worse_than_the_comfortable_one() -> None:
    chance = random.Random(7)
    for _ in range(300):
        prompts = [
            Due(chance.randint(1, 9000), chance.uniform(-1, 2), chance.uniform(0.1, 2))
            for _ in range(chance.randint(0, 20))
        ]
        comfortable_s, slack_s = chance.uniform(0, 0.03), chance.uniform(-0.1, 0.2)
        chosen = best_size(PASS_S, prompts, comfortable_s=comfortable_s, slack_s=slack_s)
        assert PASS_S[chosen] <= max(comfortable_s, slack_s, PASS_S[128])
        usual = best_size(PASS_S, [], comfortable_s=comfortable_s, slack_s=slack_s)
        assert chosen >= usual
        late, usually = (lateness(prompts, size / PASS_S[size]) for size in (chosen, usual))
        assert late < usually or chosen == usual
        more = best_size(PASS_S, prompts, comfortable_s=comfortable_s, slack_s=math.inf)
        assert lateness(prompts, more / PASS_S[more]) <= late
