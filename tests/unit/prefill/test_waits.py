"""Why a prompt waits, as each plan notes it."""

from __future__ import annotations

import pytest

from gateway.request.attempt import WORKER_WAITS
from prefill.request import note_waits
from prefill.stop import Stop
from tests.unit.prefill.scheduling import waiting
from worker.context import Admission
from worker.serving.turns import Wait


def test_gateways_know_each_reason() -> None:
    assert set(WORKER_WAITS) == set(Wait)


def test_the_time_between_two_plans_counts_for_what_the_first_one_said() -> None:
    (request,) = waiting(100)
    claimed_at = request.claimed.claimed_at
    for after_s, admission in (
        (1.0, Admission.NO_ROOM),
        (3.0, Admission.LOADING),
        (3.5, Admission.ADMITTED),
        (3.6, None),
    ):
        request.admission = admission
        note_waits([request], claimed_at + after_s)
    request.started_at = claimed_at + 3.6
    note_waits([request], claimed_at + 9.0)
    assert request.waits.ms == {
        Wait.PROMPTS: pytest.approx(1100.0),
        Wait.ROOM: pytest.approx(2000.0),
        Wait.LOAD: pytest.approx(500.0),
    }


def test_who_was_given_up_waits_for_nothing() -> None:
    (request,) = waiting(100)
    request.stop(Stop.LATE)
    note_waits([request], request.claimed.claimed_at + 1.0)
    assert request.waits.ms == {}
