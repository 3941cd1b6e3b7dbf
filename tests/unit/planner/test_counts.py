"""The counts that hosts follow: what they grow and fall to, when, and that they come to rest."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.words import Role
from planner.counts import Counts, hold
from planner.observed import Observed, WorkerLoad
from planner.policy import Decision, Memory, plan
from planner.pressure import Pressures
from planner.settings import PlanSettings
from tests.examples import examples

RULES = PlanSettings(hold_s=10.0, cooldown_s=30.0, reverse_s=60.0)
ROOM = 10  # sequences of a decode worker


def a_fleet(decode: int, *, sequences: int = 0, **facts: object) -> Observed:
    """One prefill worker, and decode workers that share the sequences."""
    share, rest = divmod(sequences, decode)
    workers = [WorkerLoad(worker="p", roles=(Role.PREFILL,), prefill_tokens_per_s=1000.0)]
    workers += [
        WorkerLoad(worker=f"d{at}", roles=(Role.DECODE,), sequences=share + (at < rest), max_sequences=ROOM)
        for at in range(decode)
    ]
    return replace(Observed(workers=tuple(workers), arriving_tokens_per_s=700.0), **facts)


def decided(decode: int, *, gaining: Role | None = None) -> Decision:
    """A decision whose target is so many decode workers."""
    nothing = Pressures(prefill=0.0, decode=0.0)
    desired = {Role.PREFILL: 1, Role.DECODE: decode}
    return Decision(move=None, reason="", pressures=nothing, desired=desired, memory=Memory(pressed=gaining))


class Watched:
    """A model whose counts are known: two decode workers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.present = 2
        self.counts = hold(0.0, a_fleet(2), decided(2), None, RULES)
        assert self.counts.told() == {}
        self.sees(2, until=RULES.hold_s)
        assert self.wanted == 2

    @property
    def wanted(self) -> int:
        return self.counts.told()["decode"]

    def sees(self, *targets: int, until: float, gaining: Role | None = None) -> None:
        """The planner's targets in turn, one a second."""
        at = 0
        while self.now < until:
            self.now += 1.0
            decision = decided(targets[at % len(targets)], gaining=gaining)
            self.counts = hold(self.now, a_fleet(self.present), decision, self.counts, RULES)
            at += 1


def test_a_count_grows_to_the_fewest_that_were_needed_all_the_while() -> None:
    model = Watched()
    model.sees(5, 4, 6, until=20.0)
    assert model.wanted == 2
    model.sees(5, 4, 6, until=21.0)
    assert model.wanted == 4
    model.sees(9, until=200.0)
    assert model.wanted == 4  # those are not here yet
    model.present = 4
    model.sees(9, until=211.0)
    assert model.wanted == 9


def test_a_count_falls_to_the_most_that_were_enough_all_the_while() -> None:
    model = Watched()
    model.present, model.counts = 5, replace(model.counts, roles=dict(model.counts.roles))
    model.sees(5, until=30.0)
    assert model.wanted == 5
    model.sees(1, 3, 2, until=90.0)
    assert model.wanted == 5
    model.sees(1, until=91.0)
    assert model.wanted == 3


def test_a_target_between_ends_the_wait() -> None:
    model = Watched()
    model.sees(3, 3, 3, 2, until=100.0)
    assert model.wanted == 2
    model.sees(1, 1, 1, 3, until=300.0)
    assert model.wanted == 2


def test_nobody_is_started_where_a_worker_is_about_to_move() -> None:
    model = Watched()
    model.sees(3, until=100.0, gaining=Role.DECODE)
    assert model.wanted == 2
    model.sees(3, until=111.0)
    assert model.wanted == 3


def test_nothing_is_told_of_loads_that_come_as_a_sum() -> None:
    model = Watched()
    for facts in ({"num_models": 2}, {"is_sum": True}):
        assert hold(50.0, a_fleet(2, **facts), decided(2), model.counts, RULES) == Counts(began_at=50.0)


@given(sequences=st.integers(0, 60), first=st.integers(1, 8), least=st.integers(1, 3), most=st.integers(3, 8))
@examples(30)
def test_a_fleet_that_follows_its_counts_comes_to_rest_under_any_constant_load(
    sequences: int, first: int, least: int, most: int
) -> None:
    """Also where hosts have bounds that the count does not know."""
    present, memory, counts, changes = first, Memory(), None, list[int]()
    for now in range(0, 1_200, 4):
        observed = a_fleet(present, sequences=sequences)
        decision = plan(float(now), observed, memory, RULES)
        memory = decision.memory
        counts = hold(float(now), observed, decision, counts, RULES)
        followed = min(max(counts.told().get("decode", present), min(least, present)), max(most, present))
        if followed != present:
            changes.append(now)
        present = followed
    assert present >= 1
    assert len(changes) <= 12
    assert not changes or changes[-1] < 700
