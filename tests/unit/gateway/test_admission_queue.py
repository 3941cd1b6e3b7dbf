"""The order among those that wait: deadlines, tenants by weight, tiers that don't starve."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.queue import FLOOR_SHARE, HIGH, FairQueue, Ticket, TieredQueue, tier_of

_names = count()
works = st.integers(1, 500)


def ticket(
    work: int = 100, *, by: float = 60.0, tier: int = 1, tenant: str = "a", weight: float = 1.0, share: float = 1.0
) -> Ticket:
    name = f"r{next(_names)}"
    return Ticket(ids=(name,), works=(work,), first_token_by=by, tier=tier, tenant=tenant, weight=weight, share=share)


@pytest.mark.parametrize(("priority", "tier"), [(-100, 0), (-1, 0), (0, 1), (1, 2), (100, 2)])
def test_a_priority_s_sign_is_its_tier(priority: int, tier: int) -> None:
    assert tier_of(priority) == tier


@given(deadlines=st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_a_tenant_s_earliest_deadline_starts_first(deadlines: list[float]) -> None:
    queue = FairQueue()
    tickets = [ticket(by=by) for by in deadlines]
    for one in tickets:
        queue.push(one)
    started = [queue.pop() for _ in tickets]
    assert started == sorted(tickets, key=lambda one: one.first_token_by)  # stable: of equal ones the first that came
    assert (len(queue), queue.work, queue.requests) == (0, 0, 0)


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=4),
    costs=st.lists(works, min_size=4, max_size=4),
    steps=st.integers(1, 150),
)
def test_backlogged_tenants_get_work_by_weight_within_one_request(
    weights: list[float], costs: list[int], steps: int
) -> None:
    queue = FairQueue()
    done: Counter[str] = Counter()
    for index, weight in enumerate(weights):
        for _ in range(2):
            queue.push(ticket(costs[index], tenant=f"t{index}", weight=weight))
    for _ in range(steps):
        started = queue.pop()
        done[started.tenant] += started.work
        queue.push(ticket(started.work, tenant=started.tenant, weight=started.weight))
    normalised = [done[f"t{index}"] / weight for index, weight in enumerate(weights)]
    steps_of = [cost / weight for cost, weight in zip(costs, weights, strict=False)]
    for one, step in zip(normalised, steps_of, strict=False):
        for other, other_step in zip(normalised, steps_of, strict=False):
            assert abs(one - other) <= max(step, other_step) * 1.000001 + 1e-6


@given(alone=st.integers(1, 60), after=st.integers(4, 40))
def test_who_was_idle_has_saved_nothing_up(alone: int, after: int) -> None:
    queue = FairQueue()
    queue.push(ticket(tenant="busy"))
    for _ in range(alone):
        queue.push(ticket(tenant="busy"))
        queue.pop()
    started: Counter[str] = Counter()
    queue.push(ticket(tenant="idle"))
    for _ in range(after):
        name = queue.pop().tenant
        started[name] += 1
        queue.push(ticket(tenant=name))
    assert abs(started["busy"] - started["idle"]) <= 2


def test_work_that_turns_out_larger_counts() -> None:
    queue = FairQueue()
    for tenant in ("a", "a", "a", "b", "b", "b"):
        queue.push(ticket(100, tenant=tenant))
    assert queue.pop().tenant == "a"
    queue.charge("a", 150)  # what it generated
    assert [queue.pop().tenant for _ in range(5)] == ["b", "b", "b", "a", "a"]


@given(low=st.lists(works, min_size=1, max_size=5), high=st.lists(works, min_size=50, max_size=200))
def test_a_lower_tier_gets_its_share_and_no_more(low: list[int], high: list[int]) -> None:
    """However much comes in above it, its next request starts after ten times its own work; never much earlier."""
    queue = TieredQueue()
    for work in low:
        queue.push(ticket(work, tier=0))
    for work in high:
        queue.push(ticket(work, tier=HIGH))
    started_high = started_low = 0
    while queue.tiers[HIGH] and queue.tiers[0]:
        following = queue.tiers[0].head()
        assert following is not None
        assert FLOOR_SHARE * started_high < started_low + following.work + FLOOR_SHARE * max(high) + 1e-6
        one = queue.pop(queue.order()[0])
        if one.tier == HIGH:
            started_high += one.work
        else:
            started_low += one.work
            assert started_low <= FLOOR_SHARE * started_high + 1e-6


@given(
    waiting=st.lists(
        st.tuples(works, st.integers(0, 2), st.sampled_from("abc"), st.floats(0, 50)), min_size=1, max_size=40
    ),
    which=st.integers(0, 39),
)
def test_no_ticket_starts_with_less_before_it_than_predicted(
    waiting: list[tuple[int, int, str, float]], which: int
) -> None:
    """The prediction is what refuses: it must not be larger than what really starts before, when nobody else comes."""
    queue = TieredQueue()
    tickets = [ticket(work, tier=tier, tenant=tenant, by=by) for work, tier, tenant, by in waiting]
    for one in tickets:
        queue.push(one)
    wanted = tickets[which % len(tickets)]
    predicted = queue.work_before(wanted)
    before = 0
    while (one := queue.pop(queue.order()[0])) is not wanted:
        before += one.work
    assert predicted <= before + 1e-6


@given(actions=st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), works, st.integers(0, 2)), max_size=60))
def test_counts_are_sums(actions: list[tuple[str, int, int]]) -> None:
    queue = TieredQueue()
    present: list[Ticket] = []
    for action, work, tier in actions:
        if action == "push":
            present.append(ticket(work, tier=tier, tenant=f"t{work % 3}"))
            queue.push(present[-1])
        elif present and action == "pop":
            present.remove(queue.pop(queue.order()[0]))
        elif present:
            gone = present.pop(work % len(present))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        assert queue.work == sum(one.work for one in present)
        assert queue.requests == len(queue) == len(present) == len(list(queue))
        assert sum(queue.work_of.values()) == queue.work
        assert set(queue.work_of) == set(queue.requests_of) == {one.tenant for one in present}
