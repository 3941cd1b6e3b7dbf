"""The results of models swapped under load: what makes a run fail."""

from __future__ import annotations

from collections import Counter

from benchmarks.models.swaps import PERCENT, SMALL, WHOLE, Tally, results_of
from benchmarks.results_format import Result

TIMES = {"demo: first start": [3.0, 1.0, 2.0]}


def results(tally: Tally, left_mb: float = 0.0) -> dict[str, Result]:
    return {one.name: one for one in results_of(tally, TIMES, Counter(demo=2), left_mb, 500.0)}


def shared(small: int, whole: int) -> Tally:
    return Tally(chosen=Counter({SMALL: small, WHOLE: whole}), waits_s=[0.5] * 99 + [9.0])


def missed(found: dict[str, Result]) -> set[str]:
    return {name for name, result in found.items() if result.met is False}


def test_a_run_in_which_nothing_went_wrong_misses_nothing() -> None:
    found = results(shared(round(10 * PERCENT), 1000 - round(10 * PERCENT)))
    assert missed(found) == set()
    assert found["demo: first start"].value == 2.0
    assert (found["load: answer, p50"].value, found["load: answer, p99"].value) == (0.5, 9.0)


def test_what_is_lost_wrong_kept_or_shared_wrongly_is_missed() -> None:
    tally = shared(70, 930)
    tally.lost.append("demo: 503")
    tally.wrong.append("demo: 'x'")
    assert missed(results(tally, left_mb=100.0)) == {
        "load: requests lost",
        "load: answers of another model",
        "memory above idle",
        "canary: off its share",
    }
    assert "canary: off its share" in missed(results(Tally()))
