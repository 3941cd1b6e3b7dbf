"""The line of a request in the log: who, how long, what came of it; never what was said."""

from __future__ import annotations

import logging

import pytest

from common.errors import OverloadedError, UnavailableError
from gateway.observe.request_metrics import MAX_REFUSALS_A_SECOND, Logged, RequestLog
from gateway.request.attempt import AttemptLine
from gateway.request.refused import Refusals
from gateway.request.timeline import Timeline, Timelines
from gateway.tenants.tenants import Tenant

ASKER = Tenant(name="acme", key="key_1")


def ended(
    logged: Logged, *, error: Exception | None = None, cancelled: str = "", drafts: tuple[int, int] = (0, 0)
) -> None:
    """A request of 5 tokens ends."""
    lines = Timelines()
    lines.on_end(RequestLog(logged).ended)
    line = Timeline(
        request_id="cmpl-1-0", received_at=1.0, submitted_at=1.0, prompt_tokens=40, asker=ASKER, model="tiny"
    )
    line.began(AttemptLine(number=1, began_at=1.0, because="", prefill="p0", decode=["d0"], reason="cache"))
    line.completion_tokens = 5
    line.frames.drafted, line.frames.accepted = drafts
    lines.start(line)
    lines.end(line, error=error, cancelled=cancelled)


def refused(log: RequestLog, times: int = 1) -> None:
    for _ in range(times):
        error = OverloadedError("the queue is full of 'my secret prompt'")
        Refusals(log.refused).add(error, request_id="r1", trace_id="", asker=ASKER, model="tiny", at=0.0)


@pytest.mark.parametrize(
    ("logged", "said"),
    [
        ("off", []),
        ("errors", ["request.failed", "request.refused"]),
        ("all", ["request.done", "request.done", "request.failed", "request.refused"]),
    ],
)
def test_what_is_logged_is_chosen(logged: Logged, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ended(logged)
    ended(logged, cancelled="client disconnected")
    ended(logged, error=UnavailableError("no decode worker for 'my secret prompt'"))
    refused(RequestLog(logged))
    assert [record.getMessage() for record in caplog.records] == said


def test_a_line_tells_of_drafts_where_there_were_any(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ended("all", drafts=(8, 0))
    ended("all")
    told = [
        {name: getattr(record, name, None) for name in ("drafted_tokens", "accepted_tokens")}
        for record in caplog.records
    ]
    assert told == [{"drafted_tokens": 8, "accepted_tokens": 0}, {"drafted_tokens": None, "accepted_tokens": None}]


def test_a_line_says_who_and_what_came_of_it_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ended("all", error=UnavailableError("no decode worker for 'my secret prompt'"))
    refused(RequestLog("all"))
    failed, turned_away = caplog.records
    facts = {"request_id": "cmpl-1-0", "tenant": "acme", "key": "key_1", "model": "tiny", "placement": "cache"}
    facts |= {"outcome": "error", "code": "unavailable", "prompt_tokens": 40, "completion_tokens": 5, "prefill": "p0"}
    assert failed.__dict__.items() >= facts.items()
    assert failed.levelno == logging.WARNING
    assert turned_away.__dict__.items() >= {"request_id": "r1", "key": "key_1", "code": "overloaded"}.items()
    assert "secret" not in str([record.__dict__ for record in caplog.records])


def test_refusals_flood_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    now = 1000.0
    monkeypatch.setattr("common.messages.arrivals.time.monotonic", lambda: now)
    log = RequestLog("errors")
    for _ in range(500):
        log.unauthorized("r2", "/v1/models")
    assert len(caplog.records) == MAX_REFUSALS_A_SECOND
    now += 1
    log.unauthorized("r3", "/v1/models")
    assert caplog.records[-1].__dict__.items() >= {"request_id": "r3", "unsaid": 500 - MAX_REFUSALS_A_SECOND}.items()
