"""Prompts that can't be in time make room for those that can."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from prefill.request import PrefillRequest
from prefill.scheduler import InFlight, stop_late
from prefill.stop import Stop
from tests.unit.prefill.scheduling import waiting
from worker.device.costs import PromptCost, pairs_of

TOKEN_S = 0.01
NOW = 1000.0


def measured() -> PromptCost:
    """A device of 100 tokens a second, without a fixed part."""
    cost = PromptCost()
    for tokens in (10, 100, 200, 50):
        cost.add(tokens, pairs_of(0, tokens), tokens * TOKEN_S)
    return cost


def prompt(tokens: int, *, first_token_in: float) -> PrefillRequest:
    [request] = waiting(tokens)
    request.claimed = replace(request.claimed, first_token_by=NOW + first_token_in)
    return request


@pytest.mark.parametrize(
    ("tokens", "first_token_in", "in_flight", "stopped"),
    [
        (100, 1.1, 0, None),
        (100, 0.9, 0, Stop.LATE),
        (100, 1.1, 50, Stop.LATE),  # the pass in flight takes half a second more
        (100, 1.6, 50, None),
        (100, math.inf, 10_000, None),  # without a deadline of its own
    ],
)
def test_a_prompt_is_given_up_when_its_first_token_cant_come_in_time(
    tokens: int, first_token_in: float, in_flight: int, stopped: Stop | None
) -> None:
    request, ahead = prompt(tokens, first_token_in=first_token_in), InFlight()
    ahead.launched(in_flight, NOW)
    stop_late([request], ahead, measured(), NOW)
    assert request.stopped is stopped


def test_passes_in_flight_count_from_when_the_one_before_landed() -> None:
    ahead, cost = InFlight(), measured()
    ahead.launched(50, NOW)
    ahead.launched(100, NOW)
    assert ahead.over_at(NOW, cost) == pytest.approx(NOW + 1.5)
    ahead.landed(50, NOW + 0.7)
    assert ahead.over_at(NOW + 0.7, cost) == pytest.approx(NOW + 1.7)
    ahead.landed(100, NOW + 1.7)
    assert ahead.over_at(NOW + 5.0, cost) == pytest.approx(NOW + 5.0)


def test_nobody_is_given_up_before_its_cached_tokens_are_known() -> None:
    request = prompt(100, first_token_in=0.5)
    request.admitted = False
    stop_late([request], InFlight(), measured(), NOW)
    assert request.stopped is None


def test_nobody_is_given_up_whose_last_pass_is_in_flight() -> None:
    request = prompt(100, first_token_in=0.5)
    request.sequence.schedule(100)
    stop_late([request], InFlight(), measured(), NOW)
    assert request.stopped is None


def test_while_nothing_is_measured_only_the_past_is_late() -> None:
    early, late = prompt(100, first_token_in=0.01), prompt(100, first_token_in=-0.01)
    stop_late([early, late], InFlight(), PromptCost(), NOW)
    assert (early.stopped, late.stopped) == (None, Stop.LATE)
