"""The planner's decision: what moves, what never does, and that it comes to rest."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.observed import Observed, Role, WorkerLoad
from planner.policy import Decision, Memory, plan
from planner.pressure import Pressures
from planner.settings import Band, PlanSettings
from tests.examples import examples

AT_ONCE = PlanSettings(hold_s=0.0, cooldown_s=0.0, reverse_s=0.0)
BLOCKS = 1000


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a fleet has to do, whoever does it."""

    arriving: float = 0.0
    unclaimed: int = 0
    claimed: int = 0
    sequences: int = 0
    blocks: int = 0
    handing_over: int = 0
    ttft_met: int = 0
    ttft_count: int = 0
    tpot_met: int = 0
    tpot_count: int = 0
    step_ms: float = 0.0  # of a worker with one sequence, without context
    block_ms: float = 0.0  # what a block adds to it

    def on(self, roles: dict[str, tuple[Role, ...]], *, rate: float = 1000.0, room: int = 10) -> Observed:
        """The load spread evenly over equal workers: what the planner would see."""
        prefill = [name for name in sorted(roles) if "prefill" in roles[name]]
        decode = [name for name in sorted(roles) if "decode" in roles[name]]
        workers = tuple(
            WorkerLoad(
                worker=name,
                roles=held,
                sequences=_share(self.sequences, decode, name),
                max_sequences=room,
                used_blocks=_share(self.blocks, decode, name),
                num_blocks=BLOCKS,
                queued_tokens=_share(self.claimed, prefill, name),
                prefill_tokens_per_s=rate,
                decode_step_ms=self._step_ms(decode, name, room) if name in decode else 0.0,
                block_read_ms=self.block_ms,
            )
            for name, held in sorted(roles.items())
        )
        return Observed(
            workers=workers,
            unclaimed_tokens=self.unclaimed,
            handing_over=self.handing_over,
            arriving_tokens_per_s=self.arriving,
            ttft_met=self.ttft_met,
            ttft_count=self.ttft_count,
            tpot_met=self.tpot_met,
            tpot_count=self.tpot_count,
        )

    def _step_ms(self, decode: list[str], name: str, room: int) -> float:
        own_ms = self.step_ms * (1 + _share(self.sequences, decode, name) / room)
        return own_ms + self.block_ms * _share(self.blocks, decode, name)


def _share(total: int, names: list[str], name: str) -> int:
    if name not in names:
        return 0
    return total // len(names) + (names.index(name) < total % len(names))


def fleet(prefill: int, decode: int, both: int = 0) -> dict[str, tuple[Role, ...]]:
    roles: dict[str, tuple[Role, ...]] = {f"p{index}": ("prefill",) for index in range(prefill)}
    roles |= {f"d{index}": ("decode",) for index in range(decode)}
    return roles | {f"b{index}": ("decode", "prefill") for index in range(both)}


def count(roles: dict[str, tuple[Role, ...]], role: Role) -> int:
    return sum(role in held for held in roles.values())


def follow(
    load: Load, roles: dict[str, tuple[Role, ...]], seconds: int, rules: PlanSettings, memory: Memory | None = None
) -> tuple[dict[str, tuple[Role, ...]], list[Decision], Memory]:
    """Plan each second, and do what was decided; all decisions with a move."""
    roles, moves, memory = dict(roles), [], memory or Memory()
    for now in range(seconds):
        decision = plan(float(now), load.on(roles), memory, rules)
        memory = decision.memory
        if decision.move:
            roles[decision.move.worker] = decision.move.roles
            moves.append(decision)
    return roles, moves, memory


fleets = st.builds(fleet, st.integers(1, 8), st.integers(1, 8), st.integers(0, 2))
attained = st.sampled_from([(0, 0), (100, 100), (50, 100), (1, 5)])


@st.composite
def loads(draw: st.DrawFn) -> Load:
    ttft, tpot = draw(attained), draw(attained)
    return Load(
        arriving=draw(st.floats(0, 9000)),
        unclaimed=draw(st.integers(0, 20_000)),
        claimed=draw(st.integers(0, 9000)),
        sequences=draw(st.integers(0, 120)),
        blocks=draw(st.integers(0, 9000)),
        handing_over=draw(st.integers(0, 40)),
        ttft_met=ttft[0],
        ttft_count=ttft[1],
        tpot_met=tpot[0],
        tpot_count=tpot[1],
        step_ms=draw(st.sampled_from([0.0, 4.0, 20.0, 60.0])),
        block_ms=draw(st.sampled_from([0.0, 0.01, 0.05])),
    )


# -- cases ---------------------------------------------------------------------------------------------------------


def test_a_prompt_heavy_load_gets_decode_workers_and_a_decode_heavy_one_gets_them_back() -> None:
    prompts = Load(arriving=1800.0, claimed=500, sequences=4, blocks=300)
    roles, moves, memory = follow(prompts, fleet(1, 3), 200, PlanSettings())
    assert (count(roles, "prefill"), count(roles, "decode")) == (3, 1)
    assert [decision.move.roles for decision in moves if decision.move] == [("prefill",), ("prefill",)]

    answers = Load(arriving=200.0, sequences=18, blocks=900)
    roles, moves, _ = follow(answers, roles, 400, PlanSettings(), replace(memory, since=0.0, moved_at=0.0))
    assert (count(roles, "prefill"), count(roles, "decode")) == (1, 3)
    assert len(moves) == 2


def test_a_move_waits_until_the_need_has_lasted_and_starts_again_after_a_break() -> None:
    rules = PlanSettings(hold_s=10.0)
    pressed, calm = Load(arriving=1500.0).on(fleet(1, 3)), Load().on(fleet(1, 3))
    memory = Memory()
    for now, observed in enumerate([pressed] * 9 + [calm] + [pressed] * 10):
        decision = plan(float(now), observed, memory, rules)
        memory = decision.memory
        assert decision.move is None
    assert plan(20.0, pressed, memory, rules).move is not None


def test_the_way_back_takes_longer_than_the_next_move_the_same_way() -> None:
    rules = PlanSettings(hold_s=0.0, cooldown_s=30.0, reverse_s=120.0)
    moved = Memory(moved_to="prefill", moved_at=0.0)
    prompts, answers = Load(arriving=3000.0).on(fleet(2, 3)), Load(sequences=29).on(fleet(2, 3))
    assert plan(29.0, prompts, moved, rules).move is None
    assert plan(30.0, prompts, moved, rules).move is not None
    assert plan(119.0, answers, moved, rules).move is None
    assert plan(120.0, answers, moved, rules).move is not None


def test_who_has_the_least_to_finish_goes() -> None:
    observed = Load(arriving=1500.0).on(fleet(1, 3))
    running = {"d0": 3, "d1": 1, "d2": 2}
    workers = tuple(replace(worker, sequences=running.get(worker.worker, 0)) for worker in observed.workers)
    move = plan(0.0, replace(observed, workers=workers), Memory(), AT_ONCE).move
    assert move is not None
    assert move.worker == "d1"

    stays = tuple(replace(worker, movable=worker.worker != "d1") for worker in workers)
    move = plan(0.0, replace(observed, workers=stays), Memory(), AT_ONCE).move
    assert move is not None
    assert move.worker == "d2"


def test_decode_that_would_be_too_full_without_a_worker_keeps_it() -> None:
    decision = plan(0.0, Load(arriving=1500.0, sequences=17).on(fleet(1, 3)), Memory(), AT_ONCE)
    assert decision.move is None
    assert "decode would be at" in decision.reason


def test_what_prefill_would_let_through_counts_for_decode() -> None:
    """Decode looks idle only because prompts don't get there: with half of the arrivals served, twice as many will decode."""
    starved = Load(arriving=4000.0, unclaimed=50_000, sequences=7)
    assert plan(0.0, replace(starved, arriving=1000.0).on(fleet(1, 3)), Memory(), AT_ONCE).move is not None
    decision = plan(0.0, starved.on(fleet(1, 3)), Memory(), AT_ONCE)
    assert decision.move is None
    assert "decode would be at 0.70" in decision.reason


def test_a_queue_behind_full_decode_workers_calls_for_decode() -> None:
    """Prefill workers hold finished prompts: the queue in front of them is not theirs."""
    stuck = Load(unclaimed=50_000, sequences=10, blocks=1000, handing_over=8)
    decision = plan(0.0, stuck.on(fleet(3, 1)), Memory(), AT_ONCE)
    assert decision.move is not None
    assert decision.move.roles == ("decode",)


def test_a_missed_service_level_counts_only_with_the_load_that_explains_it() -> None:
    missed = {"ttft_met": 10, "ttft_count": 100}
    rules = replace(AT_ONCE, least_load=0.4)
    assert plan(0.0, Load(arriving=300.0, **missed).on(fleet(1, 3)), Memory(), rules).move is None
    assert plan(0.0, Load(arriving=700.0).on(fleet(1, 3)), Memory(), rules).move is None
    assert plan(0.0, Load(arriving=700.0, **missed).on(fleet(1, 3)), Memory(), rules).move is not None


LONG = Load(sequences=12, blocks=800, step_ms=4.0, block_ms=0.03)  # occupies little; steps of two workers take 16.2 ms


def test_long_steps_call_for_decode_workers_whatever_room_there_is() -> None:
    rules = replace(AT_ONCE, step_level_ms=16.0)
    decision = plan(0.0, LONG.on(fleet(6, 2), room=100), Memory(), rules)
    assert decision.pressures.decode == pytest.approx(16.24 / 16)
    assert decision.move is not None
    assert decision.move.roles == ("decode",)
    assert decision.move.expected.decode == pytest.approx((4 + 24.48 / 3) / 16)
    assert decision.desired == {"prefill": 0, "decode": 3}  # no prompt comes
    assert plan(0.0, LONG.on(fleet(6, 2), room=100), Memory(), replace(rules, step_level_ms=80.0)).move is None


def test_a_prompt_queue_takes_no_decode_worker_whose_leaving_makes_steps_long() -> None:
    rules = replace(AT_ONCE, step_level_ms=22.0)
    decision = plan(0.0, replace(LONG, arriving=1850.0).on(fleet(2, 2), room=100), Memory(), rules)
    assert decision.move is None
    assert "decode would be at 1.29" in decision.reason


def test_steps_that_are_long_without_a_batch_move_nobody_and_ask_for_nobody() -> None:
    slow = Load(sequences=2, step_ms=60.0, tpot_count=100)
    decision = plan(0.0, slow.on(fleet(3, 2), room=1000), Memory(), AT_ONCE)
    assert decision.pressures.decode > 1
    assert decision.move is None
    assert "would not help" in decision.reason
    assert decision.desired["decode"] == 2


def test_a_queue_that_is_computed_in_time_does_not_keep_a_worker_from_decode() -> None:
    rules = replace(AT_ONCE, step_level_ms=16.0)
    late = replace(LONG, arriving=1500.0, unclaimed=4000, ttft_met=100, ttft_count=100, tpot_met=50, tpot_count=100)
    for short in (late, replace(late, tpot_met=100)):  # whether tokens are late or not
        move = plan(0.0, short.on(fleet(6, 2), room=100), Memory(), rules).move
        assert move is not None
        assert move.roles == ("decode",)
    for reason in (
        replace(late, ttft_met=50),  # first tokens are late
        replace(late, ttft_count=0, ttft_met=0),  # nobody knows
        replace(late, unclaimed=6100),  # longer than the horizon
    ):
        assert plan(0.0, reason.on(fleet(6, 2), room=100), Memory(), rules).move is None


def test_a_queue_takes_no_decode_worker_while_first_tokens_are_in_time() -> None:
    queue = Load(arriving=1000.0, unclaimed=1500, sequences=4, ttft_met=98, ttft_count=100)
    decision = plan(0.0, queue.on(fleet(2, 4)), Memory(), AT_ONCE)
    assert (decision.move, decision.pressures.prefill) == (None, 0.5)
    for need in (
        replace(queue, ttft_met=90),
        replace(queue, unclaimed=2100),  # longer than the horizon
        replace(queue, arriving=1900.0),  # it will be
    ):
        move = plan(0.0, need.on(fleet(2, 4)), Memory(), AT_ONCE).move
        assert move is not None
        assert move.roles == ("prefill",)


def test_when_both_roles_are_pressed_only_more_workers_help() -> None:
    missed = Load(arriving=600.0, sequences=18, ttft_count=100, tpot_count=100)
    decision = plan(0.0, missed.on(fleet(1, 3)), Memory(), AT_ONCE)
    assert decision.move is None
    assert "both" in decision.reason
    assert decision.desired == {"prefill": 2, "decode": 4}


def test_nothing_moves_for_the_queue_before_a_rate_was_measured() -> None:
    observed = Load(unclaimed=50_000).on(fleet(1, 3), rate=0.0)
    assert plan(0.0, observed, Memory(), AT_ONCE).move is None


def test_desired_workers_follow_the_load() -> None:
    def desired(load: Load) -> dict[Role, int]:
        return plan(0.0, load.on(fleet(2, 4)), Memory(), PlanSettings()).desired

    assert desired(Load(arriving=1500.0, sequences=30)) == {"prefill": 2, "decode": 4}
    assert desired(Load(arriving=5400.0, sequences=30)) == {"prefill": 6, "decode": 4}
    assert desired(Load(arriving=5400.0, sequences=68)) == {"prefill": 6, "decode": 8}
    assert desired(Load(arriving=0.1)) == desired(Load(unclaimed=1)) == {"prefill": 1, "decode": 1}
    assert desired(Load()) == {
        "prefill": 0,
        "decode": 1,
    }  # an autoscaler may go to zero, and nothing else can bring it there


def test_thresholds_that_would_send_roles_to_and_fro_are_refused() -> None:
    with pytest.raises(ValueError, match="below its high"):
        PlanSettings(decode=Band(low=0.9, high=0.8))
    with pytest.raises(ValueError, match="step_level_ms must be above 0"):
        PlanSettings(step_level_ms=0.0)


# -- properties ------------------------------------------------------------------------------------------------------


@given(loads(), fleets)
def test_no_role_is_ever_emptied(load: Load, roles: dict[str, tuple[Role, ...]]) -> None:
    ended, _, _ = follow(load, roles, 30, AT_ONCE)
    assert count(ended, "prefill") >= 1
    assert count(ended, "decode") >= 1


@given(loads(), fleets)
@examples(120)
def test_under_constant_load_roles_come_to_rest_and_no_worker_moves_twice(
    load: Load, roles: dict[str, tuple[Role, ...]]
) -> None:
    ended, moves, memory = follow(load, roles, len(roles), AT_ONCE)
    moved = [decision.move.worker for decision in moves if decision.move]
    assert len(set(moved)) == len(moved)
    assert len({decision.move.roles for decision in moves if decision.move}) <= 1, "to and fro"
    _, later, _ = follow(load, ended, 20, AT_ONCE, memory)
    assert later == []


@given(st.lists(st.tuples(loads(), st.integers(1, 40)), min_size=1, max_size=8), fleets)
@examples(25)
def test_moves_are_bounded_by_the_cool_down_whatever_happens(
    phases: list[tuple[Load, int]], roles: dict[str, tuple[Role, ...]]
) -> None:
    rules = PlanSettings(hold_s=0.0, cooldown_s=30.0, reverse_s=60.0)
    now, memory, moves = 0.0, Memory(), list[tuple[float, Role]]()
    for load, seconds in phases:
        for _ in range(seconds):
            now += 1.0
            decision = plan(now, load.on(roles), memory, rules)
            memory = decision.memory
            if decision.move:
                roles[decision.move.worker] = decision.move.roles
                moves.append((now, decision.move.roles[0]))
    for (before, was), (after, gets) in itertools.pairwise(moves):
        assert after - before >= (30.0 if was == gets else 60.0)


@given(loads(), fleets, st.integers(0, 50_000), st.integers(0, 50_000))
def test_more_waiting_prompts_never_cost_prefill_a_worker(
    load: Load, roles: dict[str, tuple[Role, ...]], unclaimed: int, claimed: int
) -> None:
    more = replace(load, unclaimed=load.unclaimed + unclaimed, claimed=load.claimed + claimed)
    assert _direction(load, roles) <= _direction(more, roles)


@given(loads(), fleets, st.integers(10, 100))
def test_decode_gives_nobody_away_while_tokens_are_late(
    load: Load, roles: dict[str, tuple[Role, ...]], requests: int
) -> None:
    late = replace(load, tpot_met=int(0.94 * requests), tpot_count=requests)
    assert _direction(late, roles) <= 0


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # most loads need no move
@given(loads(), fleets)
def test_a_move_lowers_the_larger_pressure_and_leaves_the_giver_room(
    load: Load, roles: dict[str, tuple[Role, ...]]
) -> None:
    decision = plan(0.0, load.on(roles), Memory(), AT_ONCE)
    assume(decision.move is not None)
    assert decision.move is not None
    before, after = decision.pressures, decision.move.expected
    assert _worst(after) <= 0.95 * _worst(before)
    giver = after.decode if decision.move.roles == ("prefill",) else after.prefill
    assert giver <= 0.6


@given(loads(), fleets)
def test_the_same_observation_gets_the_same_answer_in_any_order(load: Load, roles: dict[str, tuple[Role, ...]]) -> None:
    observed = load.on(roles)
    uneven = (replace(worker, prefill_tokens_per_s=100 / (at + 3)) for at, worker in enumerate(observed.workers))
    observed = replace(observed, workers=tuple(uneven))  # sums of such rates depend on the order
    turned = replace(observed, workers=observed.workers[::-1])
    one, other = (plan(5.0, seen, Memory(), AT_ONCE) for seen in (observed, turned))
    assert (one.move, one.reason, one.desired, one.memory) == (other.move, other.reason, other.desired, other.memory)


def _direction(load: Load, roles: dict[str, tuple[Role, ...]]) -> int:
    """1: prefill gets a worker, -1: it loses one."""
    move = plan(0.0, load.on(roles), Memory(), AT_ONCE).move
    return 0 if move is None else 1 if move.roles == ("prefill",) else -1


def _worst(pressures: Pressures) -> float:
    return max(pressures.prefill / AT_ONCE.prefill.high, pressures.decode / AT_ONCE.decode.high)
