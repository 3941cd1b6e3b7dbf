"""The counts of workers that pool: what they grow and fall to under a load, and that they come to rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.messages import WorkerState, WorkerTotals
from planner.pools import Pools, by_model, look
from planner.settings import PlanSettings
from tests.examples import examples
from tests.fakes.workers import a_worker

RULES = PlanSettings(hold_s=10.0, reverse_s=60.0)
RATE = 1000.0
PERIOD_S = 2.0


class Fleet:
    """Workers of one model that share a load, and whose number follows the counts. `load`: workers that it keeps busy."""

    def __init__(self, count: int, load: float, *, most: int = 64) -> None:
        self.count, self.load, self.most = count, load, most
        self.now = 0.0
        self.queued = 0.0
        self.computed_s = dict[str, float]()
        self.pools: Pools | None = None

    def states(self) -> list[WorkerState]:
        return [
            a_worker(
                name,
                "pool",
                queued_tokens=int(self.queued / self.count),
                prefill_tokens_per_s=RATE,
                totals=WorkerTotals(pass_s=self.computed_s[name]),
            )
            for name in list(self.computed_s)[: self.count]
        ]

    def after(self, seconds: float, *, follows: bool = True) -> int:
        """Let time go by; returns the workers that there are then."""
        for _ in range(round(seconds / PERIOD_S)):
            self.now += PERIOD_S
            busy = min(self.load / self.count, 1.0)
            for at in range(self.count):
                name = f"w{at}"
                self.computed_s[name] = self.computed_s.get(name, 0.0) + busy * PERIOD_S
            self.queued = max(0.0, self.queued + (self.load - self.count) * RATE * PERIOD_S)
            self.pools = look(self.now, self.states(), self.pools, RULES)
            if follows and self.pools.held is not None:
                self.count = min(max(1, self.pools.held.count), self.most)
        return self.count


def test_a_worker_that_is_busy_all_the_time_gets_another_one_once_it_lasted() -> None:
    fleet = Fleet(1, 0.97)
    assert fleet.after(RULES.hold_s + 4) == 1
    assert fleet.after(2 * RULES.hold_s) == 2
    assert fleet.after(300) == 2
    fleet.load = 0.1
    assert fleet.after(RULES.reverse_s - 10) == 2
    assert fleet.after(30) == 1


def test_texts_that_wait_longer_than_the_horizon_ask_for_workers_that_would_take_them() -> None:
    states = [a_worker("w", "pool", queued_tokens=4500, prefill_tokens_per_s=RATE)]
    assert look(0.0, states, None, RULES).desired == 5
    unmeasured = a_worker("v", "pool", queued_tokens=4500, prefill_tokens_per_s=0.0)
    assert look(0.0, [*states, unmeasured], None, RULES).desired == 10
    assert look(0.0, [unmeasured], None, RULES).desired == 1


def test_a_long_pass_counts_while_it_runs() -> None:
    idle = a_worker("w", "pool")
    pools = look(0.0, [idle], None, RULES)
    assert look(PERIOD_S, [idle], pools, RULES).pressure == 0.0
    assert look(PERIOD_S, [a_worker("w", "pool", busy=True, running=1)], pools, RULES).pressure == 1.0


def test_a_restarted_worker_is_measured_anew() -> None:
    old = a_worker("w", "pool", totals=WorkerTotals(pass_s=500.0))
    pools = look(0.0, [old], None, RULES)
    new = a_worker("w", "pool", incarnation=2, totals=WorkerTotals(pass_s=1.0))
    assert look(PERIOD_S, [new], pools, RULES).pressure == 0.0


def test_nothing_is_told_of_a_model_before_it_was_watched() -> None:
    fleet = Fleet(3, 0.0)
    fleet.after(RULES.hold_s)
    assert fleet.pools is not None
    assert fleet.pools.held is None
    fleet.after(PERIOD_S)
    assert fleet.pools.held is not None
    assert fleet.pools.held.count == 3


def test_each_model_has_workers_of_its_own() -> None:
    states = [a_worker("a", "pool", model="m"), a_worker("b", "pool", model="n"), a_worker("c", "pool", model="m")]
    assert {model: [state.worker for state in of] for model, of in by_model(states).items()} == {
        "m": ["a", "c"],
        "n": ["b"],
    }


@given(count=st.integers(1, 8), load=st.floats(0, 6), queued=st.floats(0, 20_000))
@examples(100)
def test_under_constant_load_the_count_is_enough_and_rests(count: int, load: float, queued: float) -> None:
    fleet = Fleet(count, load)
    fleet.queued = queued
    fleet.after(1500)
    settled = fleet.count
    assert fleet.load / settled <= RULES.prefill.high + 1e-9
    assert {fleet.after(PERIOD_S) for _ in range(100)} == {settled}
