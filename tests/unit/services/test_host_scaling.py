"""Hosts that follow the planner's counts: which worker is started or stopped where, whatever they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.messages import HostedModel
from common.words import HostStatus
from services.host.scaling import ROLES_OF, Change, change_of
from tests.examples import examples

SERVICES = tuple(ROLES_OF)


def host(*workers: str, spare: Mapping[str, int] | None = None, extra: tuple[str, ...] = ()) -> HostedModel:
    """A host whose workers are called after their service: `decode-0`."""
    roles = {worker: [*map(str, ROLES_OF[worker.split("-")[0]])] for worker in workers}
    return HostedModel(status=HostStatus.READY, workers=roles, spare=dict(spare or {}), extra=list(extra))


def changes(wanted: dict[str, int], offers: dict[str, HostedModel], **more: Any) -> dict[str, Change]:
    found = {name: change_of(name, wanted, offers, **more) for name in offers}
    return {name: change for name, change in found.items() if change != Change()}


def test_a_missing_worker_is_started_where_the_fewest_are() -> None:
    offers = {"a": host("decode-0", "decode-1", spare={"decode": 3}), "b": host("decode-2", spare={"decode": 1})}
    assert changes({"decode": 3}, offers) == {}
    assert changes({"decode": 4}, offers) == {"b": Change(start=("decode",))}
    assert changes({"decode": 9}, offers) == {"a": Change(start=("decode",) * 3), "b": Change(start=("decode",))}
    offers["b"] = host("decode-2")
    assert changes({"decode": 4}, offers) == {"a": Change(start=("decode",))}


def test_workers_that_no_host_started_count_too() -> None:
    offers = {"a": host("decode-0", spare={"decode": 3})}
    assert changes({"decode": 2}, offers, elsewhere=[["decode"]]) == {}
    assert changes({"decode": 2}, offers, elsewhere=[["prefill"]]) == {"a": Change(start=("decode",))}


def test_a_worker_of_both_roles_comes_where_there_is_no_other_one_and_stays_for_either() -> None:
    offers = {"a": host("worker-0", spare={"worker": 1, "prefill": 1})}
    assert changes({"prefill": 2, "decode": 1}, offers) == {"a": Change(start=("prefill",))}
    assert changes({"prefill": 1, "decode": 2}, offers) == {"a": Change(start=("worker",))}
    offers = {"a": host("worker-0", "worker-1", extra=("worker-1",))}
    assert changes({"prefill": 2, "decode": 1}, offers) == {}
    assert changes({"prefill": 1, "decode": 1}, offers) == {"a": Change(stop=("worker-1",))}


def test_a_surplus_worker_goes_where_the_most_are_and_never_one_that_started_with_the_model() -> None:
    offers = {
        "a": host("decode-0", "decode-1", extra=("decode-1",)),
        "b": host("decode-2", "decode-3", "decode-4", extra=("decode-3", "decode-4")),
    }
    assert changes({"decode": 4}, offers) == {"b": Change(stop=("decode-4",))}
    assert changes({"decode": 1}, offers) == {
        "a": Change(stop=("decode-1",)),
        "b": Change(stop=("decode-4", "decode-3")),
    }


def test_the_last_worker_of_a_role_stays_and_so_does_one_of_a_role_without_a_count() -> None:
    assert changes({"decode": 0, "prefill": 0}, {"a": host("decode-0", extra=("decode-0",))}) == {}
    offers = {"a": host("decode-0", "prefill-0", "prefill-1", extra=("prefill-1",))}
    assert changes({"decode": 1}, offers) == {}
    assert changes({"decode": 1, "prefill": 0}, offers) == {"a": Change(stop=("prefill-1",))}


def test_nonsense_from_others_costs_no_time() -> None:
    huge = 1 << 60
    offers = {"a": host("decode-0", spare={"decode": 2}), "b": host(spare={"decode": huge})}
    assert len(change_of("b", {"decode": huge, "fly": huge}, offers).start) < 1_000


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, HostedModel]:
    found = {}
    for at, name in enumerate("abcd"[: draw(st.integers(1, 4))]):
        workers = [f"{draw(st.sampled_from(SERVICES))}-{at}{number}" for number in range(draw(st.integers(0, 4)))]
        spare = draw(st.dictionaries(st.sampled_from(SERVICES), st.integers(0, 3)))
        extra = tuple(worker for worker in workers if draw(st.booleans()))
        found[name] = host(*workers, spare=spare, extra=extra)
    return found


COUNTS = st.dictionaries(st.sampled_from(("prefill", "decode")), st.integers(0, 8))


def roles_of(offers: Mapping[str, HostedModel]) -> Counter[str]:
    return Counter(role for offer in offers.values() for roles in offer.workers.values() for role in roles)


def taken(offers: Mapping[str, HostedModel], found: Mapping[str, Change]) -> dict[str, HostedModel]:
    """The hosts after each took its own steps. Raises what a host can't do."""
    after = {}
    for name, offer in offers.items():
        change, spare = found.get(name, Change()), Counter(offer.spare)
        spare.subtract(change.start)
        assert min(spare.values(), default=0) >= 0
        assert set(change.stop) <= set(offer.extra)
        assert len(set(change.stop)) == len(change.stop)
        workers = {worker: roles for worker, roles in offer.workers.items() if worker not in change.stop}
        new = {f"{service}-{name}-new{at}": service for at, service in enumerate(change.start)}
        workers |= {worker: [*map(str, ROLES_OF[service])] for worker, service in new.items()}
        extra = [worker for worker in offer.extra if worker in workers] + [*new]
        spare.update(worker.split("-")[0] for worker in change.stop)
        after[name] = HostedModel(status=offer.status, workers=workers, spare=dict(spare), extra=extra)
    return after


@given(offers=worlds(), wanted=COUNTS)
@examples(300)
def test_hosts_that_hear_each_other_reach_the_counts_as_far_as_they_can_and_then_rest(
    offers: dict[str, HostedModel], wanted: dict[str, int]
) -> None:
    before, after = roles_of(offers), taken(offers, changes(wanted, offers))
    assert changes(wanted, after) == {}
    counts = roles_of(after)
    for role, count in wanted.items():
        spare = [s for offer in after.values() for s, left in offer.spare.items() if left and role in ROLES_OF[s]]
        assert counts[role] >= count or not spare
        if before[role]:
            assert counts[role] >= 1
        if before[role] >= count:
            assert counts[role] >= count  # none falls below what is wanted
    for offer in after.values():
        for worker in offer.extra:
            idle = [role in wanted and counts[role] > max(1, wanted[role]) for role in offer.workers[worker]]
            assert not all(idle)  # surplus ones are gone


@given(offers=worlds(), wanted=COUNTS, seed=st.randoms(use_true_random=False))
@examples(100)
def test_the_order_in_which_hosts_are_heard_changes_nothing(
    offers: dict[str, HostedModel], wanted: dict[str, int], seed: Any
) -> None:
    names = list(offers)
    seed.shuffle(names)
    assert changes(wanted, {name: offers[name] for name in names}) == changes(wanted, offers)
