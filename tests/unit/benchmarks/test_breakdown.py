"""What a time to first token consists of."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.handoff.breakdown import explain
from cli.bench.client import Sample

PHASES = {"http": 1.0, "admission": 2.0, "queue": 3.0, "prefill": 4.0, "first_frame": 5.0, "push": 9.0}


def line(**fields: Any) -> dict[str, Any]:
    return {"request_id": "a-0", "received_at": 10.001, "first_sent_at": 10.016, "phases_ms": PHASES} | fields


def test_the_ways_are_between_both_clocks_and_the_rest_is_what_no_part_has() -> None:
    samples = [Sample(arrived=10.0, ttft=0.018, answer="a"), Sample(arrived=10.0, ttft=0.028, answer="b")]
    found = explain(samples, {"a": line(), "b": line(first_sent_at=10.021)})
    assert (found.parts["way_in"], found.parts["push"]) == (pytest.approx(1.0), 9.0)
    assert found.parts["way_out"] == pytest.approx((2 + 7) / 2)
    assert (found.count, found.ttft, found.rest) == (2, pytest.approx(23.0), pytest.approx(2.5))
    assert found.unexplained == pytest.approx(2.5 / 23)


def test_rests_of_both_signs_do_not_cancel() -> None:
    samples = [Sample(arrived=10.0, ttft=0.018, answer="a"), Sample(arrived=10.0, ttft=0.018, answer="b")]
    more, less = PHASES | {"queue": 4.0}, PHASES | {"queue": 2.0}
    found = explain(samples, {"a": line(phases_ms=more), "b": line(phases_ms=less)})
    assert (found.rest, found.unexplained) == (pytest.approx(0.0), pytest.approx(1 / 18))


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ({}, "no timeline of these 1 requests"),
        ({"a": line(first_sent_at=None)}, "a-0 sent no token"),
        ({"a": line(phases_ms={"http": 1.0})}, "does not say admission, queue, prefill, first_frame"),
    ],
)
def test_what_is_missing_is_said(lines: dict[str, dict[str, Any]], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        explain([Sample(arrived=10.0, ttft=0.018, answer="a")], lines)
