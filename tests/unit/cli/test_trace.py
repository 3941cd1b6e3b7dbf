"""`baton trace`: the waterfall."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from cli.trace.parts import parts_of
from cli.trace.view import listed, table, waterfall

PLACEMENT = {"prefill": "p0", "decode": ["d0"], "reason": "load", "costs": {"prefill_ms": 12.5, "candidates": 3.0}}


def attempt(number: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "attempt": number, "because": "", "placement": PLACEMENT, "began_ms": 10.0, "published_ms": 20.0,
        "claimed_ms": 30.0, "claimed_by": "p0", "worker_queue_ms": 5.0, "prefill_ms": 15.0, "first_token_ms": 52.0,
        "tokens": 3, "decoder": "d0", "transfer": None, "ended_ms": 100.0, "outcome": "ok",
    } | fields  # fmt: skip


def request(*attempts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "request_id": "cmpl-1-0", "trace_id": "", "status": "length", "detail": "", "prompt_tokens": 40,
        "cached_tokens": 16, "completion_tokens": 3, "ttft_ms": 52.0, "total_ms": 100.0, "num_attempts": len(attempts),
        "submitted_ms": 4.0, "waited_ms": 1.0,
        "attempts": list(attempts), "frame_ms": [52.0, 60.0, 100.0], "frame_tokens": [1, 1, 1],
    } | fields  # fmt: skip


def rows(lines: list[str]) -> dict[str, tuple[float, float]]:
    """Name of a bar -> its start and length."""
    found = {}
    for line in lines:
        if "█" in line or "░" in line or line.startswith("tokens"):
            found[line[:12].strip()] = (float(line[12:21]), float(line[21:31]))
    return found


def test_drafts_are_told_where_there_were_any() -> None:
    told = waterfall(request(attempt(), drafted_tokens=8, accepted_tokens=5), 160)[1]
    assert "3 generated, 5 of 8 drafted ones accepted" in told
    assert "drafted" not in waterfall(request(attempt(), drafted_tokens=0, accepted_tokens=0), 160)[1]
    assert "drafted" not in waterfall(request(attempt()), 160)[1]


def test_what_workers_measured_lies_between_what_the_gateway_saw() -> None:
    transfer = {
        "verified_ms": 58.0, "transfer_ms": 20.0, "blocks": 3, "bytes": 3_000_000, "reused_blocks": 1,
        "push_ms": 2.0, "late_push_ms": 0.5, "handover_ms": 6.0,
    }  # fmt: skip
    lines = waterfall(request(attempt(transfer=transfer)), 160)
    assert rows(lines) == {
        "http": (0.0, 4.0), "admission": (4.0, 6.0), "placement": (10.0, 10.0), "queue": (20.0, 10.0),
        "wait": (30.0, 5.0), "prefill": (35.0, 15.0), "first frame": (50.0, 2.0), "transfer": (38.0, 20.0),
        "handover": (52.0, 6.0), "decode wait": (58.0, 2.0), "decode": (60.0, 40.0), "tokens": (52.0, 48.0),
    }  # fmt: skip
    told = " ".join(" ".join(lines).split())
    assert "16 of them cached" in told
    assert "load, prefill_ms 12.5, candidates 3" in told
    assert "(1.5 GB/s)" in told
    assert "longest 40.0 ms" in told
    ticks = next(line for line in lines if line.startswith("tokens"))
    assert ticks.count("|") == 3
    assert sum("◀ longest" in line for line in lines) == 2
    assert "◀ longest  d0: 3 tokens" in next(line for line in lines if line.startswith("decode  "))
    assert "◀ longest to the first token" in next(line for line in lines if line.startswith("prefill"))
    assert "where it went: decode 40.0 ms (40%), prefill 15.0 ms (15%), placement 10.0 ms (10%)" in told


GIVEN_UP = {"ended_ms": 60.0, "outcome": "worker lost"}


def after_a_wait(**fields: Any) -> dict[str, Any]:
    """Its number counts how often a worker was looked for."""
    times = {"began_ms": 4_060.0, "published_ms": 4_061.0, "claimed_ms": 4_062.0, "first_token_ms": 4_090.0}
    because = "worker lost, then no decode worker is ready"
    return attempt(403, **{"because": because, **times, "ended_ms": 4_100.0, **fields})


def test_every_millisecond_belongs_to_one_part() -> None:
    transfer = {"verified_ms": 58.0, "transfer_ms": 20.0, "blocks": 3, "bytes": 3, "reused_blocks": 0, "push_ms": None}
    for one in (
        request(attempt()),
        request(attempt(transfer=transfer)),
        request(attempt(transfer=transfer), frame_ms=[]),
        request(attempt(**GIVEN_UP), after_a_wait(), total_ms=4_100.0),
        request(attempt(**GIVEN_UP), total_ms=3_000.0, status="running"),
        request(
            attempt(**GIVEN_UP),
            after_a_wait(ended_ms=4_095.0, outcome="worker lost"),
            after_a_wait(began_ms=5_000.0, published_ms=5_001.0, claimed_ms=None, ended_ms=None, outcome=""),
            total_ms=6_000.0,
            frame_ms=[52.0, 4_090.0],
        ),
    ):
        bars = [bar for part in parts_of(one) for bar in part.bars if not bar.aside]
        assert all(before.ended == after.began for before, after in itertools.pairwise(bars))
        assert sum(bar.took for bar in bars) == pytest.approx(one["total_ms"])


@pytest.mark.parametrize("total", [0.02, 1.0, 99.9, 12345.0])
def test_the_axis_has_round_instants_above_their_columns(total: float) -> None:
    lines = waterfall(request(attempt(), total_ms=total), 160)
    title = next(at for at, line in enumerate(lines) if line.startswith("part"))
    assert lines[title].split()[:5] == ["part", "from", "ms", "took", "ms"]
    instants = re.findall(r"\S+", lines[title].partition("share")[2])
    assert instants[0] == "0"
    assert 3 <= len(instants) <= 6
    assert lines[title + 1].count("╷") == len(instants)
    for found in re.finditer(r"╷", lines[title + 1]):
        assert lines[title][found.start()] != " "


def test_notes_without_place_stand_below() -> None:
    lines = waterfall(request(attempt()), 70)
    prefill = next(at for at, line in enumerate(lines) if line.startswith("prefill"))
    assert lines[prefill + 1] == "    ◀ longest to the first token  p0"


def test_only_the_longest_part_is_bold() -> None:
    lines = waterfall(request(attempt()), 160, styled=True)
    assert [line.startswith("\x1b[1mdecode ") for line in lines if "\x1b" in line] == [True]


def test_a_wait_for_a_worker_is_a_part_and_no_attempt() -> None:
    lines = waterfall(request(attempt(**GIVEN_UP), after_a_wait(), total_ms=4_100.0, ttft_ms=52.0), 160)
    assert rows(lines)["no worker"] == (60.0, 4_000.0)
    assert "◀ longest" in next(line for line in lines if line.startswith("no worker"))
    assert "-- attempt 2, because: worker lost, then no decode worker is ready" in lines
    assert "where it went: no worker 4000.0 ms (98%)" in " ".join(lines)
    waiting = waterfall(request(attempt(**GIVEN_UP), total_ms=1_060.0, status="running"), 160)
    assert rows(waiting)["no worker"] == (60.0, 1_000.0)


def test_an_attempt_that_was_given_up_says_why_and_the_next_one_too() -> None:
    lost = attempt(ended_ms=60.0, outcome="worker lost")
    again = attempt(2, because="worker lost", began_ms=61.0, published_ms=62.0, claimed_ms=63.0, first_token_ms=90.0)
    lines = waterfall(request(lost, again), 160)
    assert sum(line.startswith("prefill") for line in lines) == 2
    assert any(line.startswith("given up") and "worker lost" in line for line in lines)
    assert "-- attempt 2, because: worker lost" in lines


@pytest.mark.parametrize("missing", ["published_ms", "claimed_ms", "first_token_ms"])
def test_what_has_not_happened_yet_has_no_row(missing: str) -> None:
    order = ["published_ms", "claimed_ms", "first_token_ms"]
    unknown = dict.fromkeys(order[order.index(missing) :]) | {"ended_ms": None, "outcome": "", "prefill_ms": None}
    running = request(attempt(**unknown), status="running", ttft_ms=None, frame_ms=[], frame_tokens=[])
    found = rows(waterfall(running, 120))
    assert "decode" not in found
    assert ("queue" in found) == (missing != "published_ms")
    assert ("prefill" in found) == (missing == "first_token_ms")
    assert rows(waterfall(request(status="error", detail="overloaded: full", ttft_ms=None, frame_ms=[]), 120))


def test_no_line_is_wider_than_the_terminal() -> None:
    assert max(map(len, waterfall(request(attempt()), 60))) <= 60
    lists = {"running": [], "latest": [request()], "slowest": [request(ttft_ms=None)]}
    assert max(map(len, table(lists, 60))) <= 60


def test_lists_are_numbered_through() -> None:
    lists = {
        "running": [request(request_id="a")],
        "slowest": [request(request_id="b")],
        "latest": [request(request_id="a")],
    }
    assert listed(lists) == ["a", "b", "a"]
    numbers = [line.split()[0] for line in table(lists, 200) if line.split()[:1] and line.split()[0].isdigit()]
    assert numbers == ["1", "2", "3"]
