"""The load of the benchmarks: as many requests a second as it says, at the gaps of a Poisson process."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from benchmarks.client import Load, _arrivals


def load(rate: float, count: int) -> Load:
    return Load(prompt=8, answer=2, rate=rate, count=count, vocab_size=100)


@pytest.mark.parametrize("seed", range(3))
def test_requests_come_at_the_rate_that_is_named_whatever_the_seed_is(seed: int) -> None:
    at = _arrivals(load(10, 400), random.Random(seed))
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]

    assert at[0] == 0
    assert sum(gaps) == pytest.approx(40, rel=0.02)  # less the gap behind the last one
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.2)  # as in a Poisson process


def test_without_a_rate_nothing_is_waited_for() -> None:
    assert _arrivals(load(0, 3), random.Random(1)) == [0.0, 0.0, 0.0]
