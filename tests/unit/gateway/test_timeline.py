"""What is kept of recent requests, and how much of it."""

from __future__ import annotations

import pytest

from common.errors import OverloadedError
from common.messages import Imported, Settle, Tokens
from gateway.request.timeline import (
    MAX_ATTEMPTS,
    MAX_FRAMES,
    MAX_RECENT,
    MAX_SLOWEST,
    STOP_STRING,
    AttemptLine,
    Timeline,
    Timelines,
)
from tests.unit.gateway.conftest import Gateway


def timeline(request_id: str = "cmpl-a-0", *, received_at: float = 100.0) -> Timeline:
    return Timeline(request_id=request_id, received_at=received_at, submitted_at=received_at + 0.002, prompt_tokens=40)


def attempt(number: int, began_at: float, because: str = "") -> AttemptLine:
    return AttemptLine(
        number=number, began_at=began_at, because=because, prefill=f"p{number}", decode=["d0", "d1"], reason="load"
    )


def first_token(number: int = 1, **fields: float) -> Tokens:
    return Tokens(request_id="cmpl-a-0", attempt=number, position=0, token_ids=b"", cached_tokens=16, **fields)


def imported(number: int) -> Imported:
    return Imported(
        request_id="cmpl-a-0", attempt=number, worker="d0", incarnation=1,
        transferred_blocks=2, transferred_bytes=4096, reused_blocks=1, transfer_ms=3.0,
    )  # fmt: skip


def test_attempts_without_a_worker_are_bounded_and_what_somebody_began_is_kept() -> None:
    line = timeline()
    for number in range(1, 500):
        line.began(attempt(number, 100.0 + number))
        if number in (1, 200):
            line.claimed("p1", 100.0 + number)
    assert len(line.attempts) == MAX_ATTEMPTS
    assert [one.number for one in line.attempts][:2] == [1, 200]
    assert [one.number for one in line.attempts][-5:] == [495, 496, 497, 498, 499]
    assert line.summary()["num_attempts"] == 499


def test_a_moved_request_tells_both_attempts_and_why() -> None:
    line = timeline()
    line.began(attempt(1, 100.003))
    line.attempts[0].published_at = 100.004
    line.claimed("p1", 100.005)
    line.took(first_token(queue_ms=1.0, prefill_ms=20.0), 1, "", 100.030)
    line.imported(imported(1), 100.033)
    line.gave_up("worker lost", 100.100)
    line.began(attempt(2, 100.101, because="worker lost"))
    line.claimed("p2", 100.102)
    line.took(first_token(2, queue_ms=2.0, prefill_ms=5.0), 3, "length", 100.120)
    line.settled(
        Settle(request_id="cmpl-a-0", attempt=1, worker="p1", incarnation=1, push_ms=2.5)
    )  # late: still its own
    line.ended("length", "", 100.125)

    told = line.as_json()
    first, second = told["attempts"]
    assert (first["outcome"], first["ended_ms"]) == ("worker lost", 100.0)
    assert first["transfer"] == {
        "verified_ms": 33.0, "transfer_ms": 3.0, "blocks": 2, "bytes": 4096, "reused_blocks": 1,
        "push_ms": 2.5, "late_push_ms": 0.0, "handover_ms": 0.0,
    }  # fmt: skip
    assert (second["because"], second["outcome"], second["transfer"]) == ("worker lost", "ok", None)
    assert (second["worker_queue_ms"], second["prefill_ms"], second["first_token_ms"]) == (2.0, 5.0, 120.0)
    assert (told["ttft_ms"], told["total_ms"], told["cached_tokens"]) == (30.0, 125.0, 16)
    assert told["frame_tokens"] == [1, 3]
    assert told["frame_ms"] == pytest.approx([30.0, 120.0], abs=0.01)
    assert line.summary()["prefill_worker"] == "p2"


def test_http_is_the_time_until_it_was_read_and_from_the_first_token_until_its_event() -> None:
    line = timeline()
    line.shown(100.020)  # no token yet
    assert line.summary()["phases_ms"] == {}
    line.took(first_token(), 1, "", 100.030)
    line.shown(100.031)
    line.shown(100.090)  # a later token
    assert line.summary()["phases_ms"] == {"http": 3.0}
    assert line.summary()["first_sent_at"] is None  # its text may be held back
    line.shown(100.034, sent=True)
    line.shown(100.099, sent=True)
    told = line.summary()
    assert (told["phases_ms"], told["received_at"], told["first_sent_at"]) == ({"http": 6.0}, 100.0, 100.034)


def test_the_arrivals_kept_of_a_long_answer_are_bounded_and_its_tokens_all_counted() -> None:
    line = timeline()
    for _ in range(MAX_FRAMES + 100):
        line.took(first_token(), 2, "", 101.0)
    assert len(line.as_json()["frame_ms"]) == MAX_FRAMES
    assert line.completion_tokens == 2 * (MAX_FRAMES + 100)


def test_the_newest_and_the_slowest_requests_stay_and_no_more() -> None:
    timelines = Timelines()
    for number in range(MAX_RECENT + 100):
        line = timeline(f"cmpl-{number}-0")
        timelines.start(line)
        line.took(first_token(), 1, "length", 100.0 + (5.0 if number < MAX_SLOWEST else 0.001))
        timelines.end(line)
    told = timelines.as_json(limit=9999)
    assert [len(told[name]) for name in ("running", "latest", "slowest")] == [0, MAX_RECENT, MAX_SLOWEST]
    assert told["latest"][0]["request_id"] == f"cmpl-{MAX_RECENT + 99}-0"
    assert {entry["ttft_ms"] for entry in told["slowest"]} == {5000.0}
    assert timelines.find("cmpl-0-0")  # not among the latest any more
    assert not timelines.find(f"cmpl-{MAX_SLOWEST}-0")


def test_an_answer_s_id_finds_all_of_its_choices_in_order() -> None:
    timelines = Timelines()
    for index in (10, 2, 0):
        timelines.start(timeline(f"chatcmpl-x-{index}"))
    timelines.start(timeline("chatcmpl-y-0"))
    assert [line.request_id for line in timelines.find("chatcmpl-x")] == [f"chatcmpl-x-{index}" for index in (0, 2, 10)]
    assert [line.request_id for line in timelines.find("chatcmpl-x-2")] == ["chatcmpl-x-2"]
    assert timelines.find("chatcmpl") == []


@pytest.mark.parametrize(
    ("error", "cancelled", "status", "detail"),
    [
        (None, "", "length", ""),
        (None, STOP_STRING, "length", ""),
        (None, "client disconnected", "cancelled", "client disconnected"),
        (OverloadedError("full"), "deadline", "error", "overloaded: full"),
        (KeyError("x"), "", "error", "KeyError"),
    ],
)
def test_how_a_request_ended(error: Exception | None, cancelled: str, status: str, detail: str) -> None:
    timelines, line = Timelines(), timeline()
    timelines.start(line)
    line.took(first_token(), 1, "length", 100.1)
    timelines.end(line, error=error, cancelled=cancelled)
    timelines.end(line, cancelled="answer ended")  # whoever cleans up comes second
    assert (line.status, line.detail) == (status, detail)
    assert len(timelines.as_json(10)["latest"]) == 1


async def test_the_routes(gateway: Gateway) -> None:
    line = timeline("cmpl-seen-0")
    gateway.script.timelines.start(line)
    told = (await gateway.http.get("/debug/requests?limit=5")).json()
    assert [entry["request_id"] for entry in told["running"]] == ["cmpl-seen-0"]
    found = (await gateway.http.get("/debug/requests/cmpl-seen")).json()["requests"]
    assert found[0]["submitted_ms"] == 2.0
    missing = await gateway.http.get("/debug/requests/cmpl-other")
    assert missing.status_code == 404
    assert "cmpl-other" in missing.json()["error"]["message"]
    wrong = await gateway.http.get("/debug/requests?limit=-1")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limit")


def test_who_waits_is_listed_and_found_until_it_starts_or_leaves() -> None:
    timelines, first, second, third = Timelines(), timeline("a-0"), timeline("b-0"), timeline("b-1")
    with timelines.waiting([first]), timelines.waiting([second, third]):
        told = timelines.as_json(10)
        assert [entry["request_id"] for entry in told["waiting"]] == ["a-0", "b-0", "b-1"]  # the longest first
        assert (told["running"], first.status) == ([], "waiting")
        assert [line.request_id for line in timelines.find("b")] == ["b-0", "b-1"]
        detail = first.as_json()
        assert detail["waited_ms"] > 0
        assert (detail["attempts"], detail["prefill_worker"]) == ([], "")
        timelines.start(second)
        told = timelines.as_json(10)
        assert [entry["request_id"] for entry in told["waiting"]] == ["a-0", "b-1"]
        assert [entry["status"] for entry in told["running"]] == ["running"]
    told = timelines.as_json(10)
    assert (told["waiting"], len(told["running"]), told["latest"]) == ([], 1, [])  # who was refused leaves no line
