"""Who may come in, who starts, and when the others may try again."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import KVLayout, Region, WorkerState
from common.words import WorkerStatus
from decode import pacing
from gateway.admission.policy import (
    ADMISSION_HEADROOM,
    AGEING,
    MAX_RETRY_AFTER_S,
    Admission,
    RefusedError,
    RequestLimits,
)
from gateway.admission.queue import HIGH, Ticket
from gateway.admission.supply import Capacity, Prefiller, prefillers

LAYOUT = KVLayout(num_blocks=1, num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
LIMITS = RequestLimits(max_requests=10, max_queued_tokens=1000, reserved=0.0)
_names = count()


def wanting(work: int, *, wait_s: float, per_token_s: float = 0.01, at: float = 0.0) -> Ticket:
    """A prompt that is refused by its goal."""
    goal = {"begin_by": at + wait_s, "good_by": at + wait_s + per_token_s * work}
    return Ticket(ids=(f"r{next(_names)}",), works=(work,), first_token_by=math.inf, arrived_at=at, **goal)


def ticket(*works: int, by: float = 1e9, tier: int = 1, tenant: str = "a", share: float = 1.0) -> Ticket:
    ids = tuple(f"r{next(_names)}" for _ in works)
    return Ticket(ids=ids, works=works, first_token_by=by, tier=tier, tenant=tenant, share=share)


def fleet(*rates: float, queued: tuple[int, ...] = (), **more: int) -> Capacity:
    loads = queued or (0,) * len(rates)
    workers = (Prefiller(tokens_per_s=rate, queued_tokens=load) for rate, load in zip(rates, loads, strict=True))
    return Capacity(workers=tuple(workers), **more)


def start_all(admission: Admission, capacity: Capacity) -> list[Ticket]:
    started = []
    while (one := admission.next(capacity)) is not None:
        started.append(one)
    return started


def refused(admission: Admission, one: Ticket, capacity: Capacity, now: float = 0.0) -> RefusedError | None:
    try:
        admission.offer(one, capacity, now)
    except RefusedError as refusal:
        return refusal
    return None


# -- bounds ----------------------------------------------------------------------------------------------------------------


def test_requests_are_bounded_and_choices_count_one_by_one() -> None:
    admission, capacity = Admission(LIMITS), fleet(100.0)
    assert refused(admission, ticket(*[1] * 9), capacity) is None
    refusal = refused(admission, ticket(1, 1), capacity)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == ("requests", 1.0)
    assert refused(admission, ticket(1), capacity) is None
    [nine, one] = start_all(admission, capacity)
    admission.ended(nine.ids[0])
    admission.ended(nine.ids[0])  # again
    assert admission.in_flight == 9
    admission.withdraw(one)
    assert admission.in_flight == 8


def test_tokens_are_bounded_but_a_prompt_alone_may_be_longer() -> None:
    admission, capacity = Admission(LIMITS), fleet(100.0)
    alone = ticket(5000)
    assert refused(admission, alone, capacity) is None
    assert start_all(admission, capacity) == [alone]
    refusal = refused(admission, ticket(100), capacity)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == ("tokens", pytest.approx(41.0))
    admission.placed(alone.ids[0], 700)  # the rest is cached there
    assert refused(admission, ticket(300), capacity) is None
    admission.computed(alone.ids[0])
    assert refused(admission, ticket(700), capacity) is None
    assert admission.queue.work == 1000


def test_no_tenant_fills_the_queue() -> None:
    admission, capacity = Admission(LIMITS), fleet(100.0)
    admission.offer(ticket(1), capacity, 0.0)
    start_all(admission, fleet(1.0))
    for _ in range(4):
        assert refused(admission, ticket(100, share=0.4), capacity) is None
    refusal = refused(admission, ticket(100, share=0.4), capacity)
    assert refusal is not None
    assert refusal.reason == "share"
    assert refused(admission, ticket(100, tenant="b", share=0.4), capacity) is None


offers = st.lists(
    st.tuples(
        st.sampled_from(["offer"] * 4 + ["first token", "end", "withdraw"]),
        st.integers(1, 600), st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 99),
    ),
    max_size=80,
)  # fmt: skip


@given(actions=offers, reserved=st.sampled_from([0.0, 0.1, 0.3]), workers=st.integers(1, 4))
def test_bounds_reserves_and_an_idle_window(
    actions: list[tuple[str, int, int, str, int]], reserved: float, workers: int
) -> None:
    limits = RequestLimits(max_requests=20, max_queued_tokens=3000, reserved=reserved, window_s=1.0)
    admission, capacity = Admission(limits), fleet(*[300.0] * workers)
    size = 300.0 * workers
    present: list[Ticket] = []
    window: dict[str, Ticket] = {}

    def held(tiers: range) -> int:
        return sum(min(one.work, 300) for one in window.values() if one.tier in tiers)

    def begins(started: Ticket, lower: int, in_all: int) -> None:
        if started.tier < HIGH:  # the reserve is not touched, unless a worker would have nothing
            assert lower < (1 - reserved) * size or len(window) < workers
        else:
            assert in_all < size or held(range(HIGH, HIGH + 1)) < reserved * size or len(window) < workers
        window[started.ids[0]] = started

    for action, work, tier, tenant, pick in actions:
        if action == "offer":
            one = ticket(work, tier=tier, tenant=tenant)
            if pick % 2 and admission.would_start(one, capacity, 0.0):
                lower, in_all = held(range(HIGH)), held(range(HIGH + 1))
                admission.start_at_once(one, capacity)
                assert one.started
                begins(one, lower, in_all)
                present.append(one)
            elif refused(admission, one, capacity) is None:
                present.append(one)
        elif action == "first token" and window:
            name = list(window)[pick % len(window)]
            del window[name]
            admission.computed(name)
        elif present and action in ("end", "withdraw"):
            one = present.pop(pick % len(present))
            window.pop(one.ids[0], None)
            if action == "end" and one.started:
                admission.ended(one.ids[0], generated=work)
            else:
                admission.withdraw(one)
        while True:
            lower, in_all = held(range(HIGH)), held(range(HIGH + 1))
            started = admission.next(capacity)
            if started is None:
                break
            begins(started, lower, in_all)
        waiting = [one for one in present if not one.started]
        assert admission.in_flight == len(present) <= limits.max_requests
        assert sum(one.tier < HIGH for one in present) <= math.ceil((1 - reserved) * limits.max_requests)
        assert admission.window_work == sum(one.work for one in window.values())
        assert admission.window_fill == held(range(HIGH + 1))
        tokens = admission.queue.work + admission.window_work
        assert tokens <= limits.max_queued_tokens or len(waiting) + len(window) == 1
        if waiting:  # never is the window idle meanwhile
            assert held(range(HIGH + 1)) >= (1 - reserved) * size
            assert len(window) >= max(1, int((1 - reserved) * workers))
        if any(one.tier == HIGH for one in waiting):
            assert held(range(HIGH + 1)) >= size
            assert held(range(HIGH, HIGH + 1)) >= reserved * size


def test_the_highest_tier_starts_though_others_overran_the_window() -> None:
    admission, capacity = Admission(RequestLimits(reserved=0.1)), fleet(100.0)
    for one in (ticket(5000), ticket(50)):
        admission.offer(one, capacity, 0.0)
    assert [one.work for one in start_all(admission, capacity)] == [5000]
    for one in (ticket(9, tier=HIGH), ticket(9, tier=HIGH)):
        admission.offer(one, capacity, 0.0)
    assert [one.work for one in start_all(admission, capacity)] == [9, 9]
    assert admission.queue.work == 50


def test_a_long_prompt_keeps_one_worker_s_part_of_the_window() -> None:
    """It is computed by one; the other's part is for the others."""
    admission, capacity = Admission(RequestLimits(reserved=0.0)), fleet(100.0, 100.0)
    for one in (ticket(5000), ticket(60), ticket(40), ticket(10)):
        admission.offer(one, capacity, 0.0)
    assert [one.work for one in start_all(admission, capacity)] == [5000, 60, 40]
    assert (admission.window_fill, admission.window_work) == (200, 5100)
    admission.computed(next(iter(admission._parts)))
    assert admission.window_fill == 100


def beside(*, queued: int = 0, unplaced: int = 0) -> Capacity:
    """A prefill worker, and a decode worker that computes 40 tokens a second beside its batch."""
    decode = Prefiller(tokens_per_s=40.0, queued_tokens=queued, decodes=True)
    return Capacity(workers=(Prefiller(tokens_per_s=100.0), decode), unplaced_tokens=unplaced)


def test_short_prompts_pass_those_that_wait_while_a_decode_worker_has_none() -> None:
    """One for each such worker until the fleet is looked at again; 0.5 s are 20 tokens there."""
    admission = Admission(RequestLimits(reserved=0.0))
    start_all(admission, busy := beside(queued=1))
    for one in (*(ticket(70) for _ in range(4)), ticket(21), ticket(20), ticket(5)):
        admission.offer(one, busy, 0.0)
    assert [one.work for one in start_all(admission, busy)] == [70, 70]
    capacity = beside()
    assert [one.work for one in start_all(admission, capacity)] == [20]
    assert capacity.short == 0
    assert [one.work for one in start_all(admission, beside())] == [5]
    assert start_all(admission, beside()) == []
    assert [one.work for one in admission.queue] == [70, 70, 21]


def test_a_short_prompt_is_not_refused_for_a_queue_that_it_passes() -> None:
    admission = Admission(RequestLimits(reserved=0.0))
    assert refused(admission, ticket(20, by=1.0), beside(queued=1, unplaced=500)) is not None
    assert refused(admission, ticket(20, by=1.0), beside(unplaced=500)) is None
    assert refused(admission, ticket(21, by=1.0), beside(unplaced=500)) is not None


def test_without_workers_nothing_starts() -> None:
    admission = Admission(LIMITS)
    admission.offer(ticket(5), fleet(), 0.0)
    assert admission.next(fleet()) is None


# -- time ------------------------------------------------------------------------------------------------------------------


def test_each_worker_s_part_of_what_is_ahead() -> None:
    capacity = fleet(100.0, 50.0, queued=(200, 0))  # free in 2 s, free now
    assert capacity.wait_s(0) == 0
    assert capacity.wait_s(75) == pytest.approx(1.5)
    assert capacity.wait_s(250) == pytest.approx(3.0)  # 150 there, 100 here
    assert capacity.first_token_s(0, 10) == pytest.approx(0.2)
    assert capacity.first_token_s(0, 1000) == pytest.approx(12.0)  # the fast one, though it has to finish first
    assert fleet(0.0).first_token_s(10**6, 10**6) == 0  # nothing measured: nobody is refused for time


@given(
    workers=st.lists(st.tuples(st.floats(1, 1000), st.integers(0, 2000)), min_size=1, max_size=5),
    ahead=st.integers(0, 5000),
    work=st.integers(1, 5000),
)
def test_the_cheap_bound_is_one(workers: list[tuple[float, int]], ahead: int, work: int) -> None:
    capacity = fleet(*(rate for rate, _ in workers), queued=tuple(load for _, load in workers))
    needs_s = capacity.first_token_s(ahead, work)
    assert needs_s <= (capacity.wait_s(ahead) + capacity.fastest_s(work)) * (1 + 1e-9)
    assert needs_s >= capacity.wait_s(ahead)
    assert needs_s <= capacity.first_token_s(ahead + 1, work) * (1 + 1e-9)


@given(
    works=st.lists(st.integers(1, 300), min_size=1, max_size=25),
    slack=st.lists(st.floats(0.1, 20), min_size=25, max_size=25),
    queued=st.integers(0, 500),
)
def test_who_is_refused_would_be_late_and_who_comes_in_is_not(
    works: list[int], slack: list[float], queued: int
) -> None:
    """One worker of 100 tokens/s that computes one prompt after another; deadlines grow, so nobody overtakes."""
    admission = Admission(RequestLimits(max_requests=100, reserved=0.0))
    busy_until, by = queued / 100, 0.0
    for work, more in zip(works, slack, strict=False):
        by += more
        in_worker = fleet(100.0, queued=(queued + admission.window_work,))
        refusal = refused(admission, ticket(work, by=by), in_worker)
        needs_s = busy_until * (1 + ADMISSION_HEADROOM) + work / 100
        assert (refusal is None) == (needs_s <= by) or needs_s == pytest.approx(by)
        if refusal is None:
            busy_until += work / 100
            start_all(admission, in_worker)
        else:
            assert refusal.reason == "deadline"
            assert 1.0 <= refusal.retry_after_s <= MAX_RETRY_AFTER_S


def test_a_waiting_request_is_refused_as_soon_as_it_can_t_be_served_in_time() -> None:
    admission, capacity = Admission(LIMITS), fleet(100.0, queued=(0,))
    first, second, third = ticket(100, by=20.0), ticket(300, by=5.0), ticket(200, by=7.0)
    for one in (first, second, third):
        admission.offer(one, capacity, 0.0)
    assert admission.late(capacity, 0.0) == []
    [(late, why)] = admission.late(fleet(100.0, queued=(250,)), 0.0)  # 2.5 + 3 s are too many for the second
    assert late is second
    assert (why.reason, admission.queue.work) == ("deadline", 300)
    assert [one for one, _ in admission.late(capacity, 5.5)] == [third]
    assert [one for one, _ in admission.late(fleet(0.0), 20.5)] == [first]  # also without any rate
    assert admission.in_flight == 0


def test_who_is_refused_by_a_goal_is_told_which_field_and_when_to_come_back() -> None:
    admission, capacity = Admission(LIMITS), fleet(100.0, queued=(300,))
    assert refused(admission, ticket(100, by=60.0), capacity) is None  # a deadline alone leaves time
    assert refused(admission, wanting(100, wait_s=4.1), capacity) is None
    refusal = refused(Admission(LIMITS), wanting(100, wait_s=1.0), capacity)
    assert refusal is not None
    assert (refusal.reason, refusal.param, refusal.retry_after_s) == ("goal", "ttft_slo_ms", pytest.approx(2.0))
    refusal = refused(admission, wanting(300, wait_s=2.0, per_token_s=0.001), fleet(100.0))
    assert refusal is not None
    assert refusal.retry_after_s == MAX_RETRY_AFTER_S  # an idle worker is too slow for it


def test_a_longer_prompt_may_compute_longer_by_its_goal_but_not_wait_longer() -> None:
    capacity = fleet(100.0, queued=(150,))
    for work in (10, 800):
        assert refused(Admission(LIMITS), wanting(work, wait_s=1.6, per_token_s=0.1), capacity) is None
        assert refused(Admission(LIMITS), wanting(work, wait_s=1.4, per_token_s=0.1), capacity) is not None


def test_further_prompts_of_a_request_are_not_the_wait_of_its_first_one() -> None:
    several = replace(wanting(10, wait_s=0.5), ids=("first", "second"), works=(10, 800))
    assert refused(Admission(LIMITS), several, fleet(100.0)) is None
    assert refused(Admission(LIMITS), replace(several, begin_by=0.4), fleet(100.0, queued=(50,))) is not None


def test_a_waiting_request_is_refused_when_its_goal_can_t_be_met_any_more() -> None:
    admission = Admission(LIMITS)
    first, second = wanting(100, wait_s=5.0), wanting(100, wait_s=5.0)
    for one in (first, second):
        admission.offer(one, fleet(100.0), 0.0)
    assert admission.late(fleet(100.0), 0.0) == []
    [(late, why)] = admission.late(fleet(100.0, queued=(450,)), 0.0)
    assert (late, why.reason) == (second, "goal")


def test_a_short_prompt_overtakes_a_long_one_that_was_started_where_workers_take_turns() -> None:
    def fits(*, decodes: bool, work: int) -> bool:
        admission = Admission(RequestLimits(reserved=0.0))
        admission.start_at_once(ticket(400), Capacity(workers=(Prefiller(tokens_per_s=100.0),)))
        busy = Capacity(workers=(Prefiller(tokens_per_s=100.0, queued_tokens=400, decodes=decodes),))
        return refused(admission, wanting(work, wait_s=3.0), busy) is None

    assert fits(decodes=True, work=50)
    assert not fits(decodes=True, work=450)
    assert not fits(decodes=False, work=50)  # a worker that only prefills goes by age
    assert AGEING == pacing.AGEING


def test_what_can_never_be_in_time_comes_back_late() -> None:
    refusal = refused(Admission(LIMITS), ticket(900, by=1.0), fleet(100.0))
    assert refusal is not None
    assert refusal.retry_after_s == MAX_RETRY_AFTER_S


def test_other_gateways_count() -> None:
    admission = Admission(LIMITS)
    assert refused(admission, ticket(100, by=3.0), fleet(100.0, gateways=2, unplaced_tokens=150)) is None
    refusal = refused(Admission(LIMITS), ticket(100, by=3.0), fleet(100.0, gateways=2, unplaced_tokens=250))
    assert refusal is not None
    # behind one of ours, the other gateway's waiting one starts, too
    refusal = refused(
        admission, ticket(100, by=3.5), fleet(100.0, gateways=2, unplaced_tokens=100, waiting_elsewhere=900)
    )
    assert refusal is not None
    assert fleet(100.0, gateways=2).window(1.0) == 100  # all of it while the others have nothing
    assert fleet(100.0, gateways=2, started_elsewhere=90).window(1.0) == 50


# -- the fleet ---------------------------------------------------------------------------------------------------------------


def worker(name: str, prefill_rate: float = 0.0, local_rate: float = 0.0, queued: int = 0) -> WorkerState:
    return WorkerState(
        worker=name, incarnation=1, roles=[], status=WorkerStatus.READY, model="m", model_fingerprint="m",
        tokenizer_fingerprint="t",
        vocab_size=10, max_model_len=100, region=Region(transport="shm", incarnation=1, layout=LAYOUT, address={}),
        prefill_tokens_per_s=prefill_rate, local_tokens_per_s=local_rate, queued_tokens=queued,
    )  # fmt: skip


def rates(prefill: list[WorkerState], decode: list[WorkerState], *, local: bool = True) -> list[float]:
    return [one.tokens_per_s for one in prefillers(prefill, decode, local=local, queued={})]


def test_who_computes_prompts_at_which_rate() -> None:
    assert rates([worker("p", 100.0), worker("q", 50.0)], [worker("d", 40.0, 10.0)], local=False) == [100.0, 50.0]
    assert rates([worker("p", 100.0)], [worker("d", 40.0, 15.0)]) == [100.0, 15.0]
    assert rates([worker("p", 100.0)], [worker("d", 40.0)]) == [100.0, 10.0]  # a quarter until it is measured
    assert rates([worker("p", 100.0), worker("q")], []) == [100.0, 100.0]  # unmeasured: as the slowest that has
    assert rates([worker("p", 100.0)], [worker("p", 100.0, 20.0)]) == [100.0]  # both roles: once
    assert rates([], [worker("d", 80.0, 20.0), worker("e", 40.0)], local=False) == [20.0, 40.0]
    assert rates([worker("p")], [worker("d")]) == [0.0]
    [one] = prefillers([worker("p", 1.0, queued=7)], [], local=True, queued={"p": 5})  # the caller knows better
    assert one.queued_tokens == 5
