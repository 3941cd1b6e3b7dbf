"""What a gateway writes down for the console: rings of figures, events, refusals, planners' decisions, and the search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from common.errors import InvalidRequestError, OverloadedError, RateLimitedError, UnavailableError
from common.messages import Goal, PlannerState
from gateway.console.chronicle import LOST_FOR_S, MAX_EVENTS, QUIET_S, Chronicle, Heard
from gateway.console.decisions import MAX_DECISIONS, MAX_PLANNERS, Decisions
from gateway.console.recorder import SPANS, History, Recorder, class_of, merged_history, milliseconds_of
from gateway.console.search import Wanted, found
from gateway.request.attempt import AttemptLine
from gateway.request.refused import MAX_REFUSED, Refusals
from gateway.request.timeline import Timeline
from gateway.tenants.tenants import Tenant
from tests.fakes.generations import ScriptedGenerations

T = 1_800_000_000.0  # a multiple of all steps
GOAL = Goal(ttft_ms=1000.0, tpot_ms=50.0)
ACME = Tenant(name="acme", key="key-2")


# -- rings of figures ---------------------------------------------------------------------------------------------------


def test_rings_are_bounded_and_older_samples_are_coarser() -> None:
    history = History()
    for second in range(0, 8 * 3600, 2):
        history.count(T + second, ended=1)
    for span, (step_s, length) in SPANS.items():
        samples = history.as_json(span)
        assert len(samples) == length
        assert samples[-1]["at"] == T + 8 * 3600 - step_s
        assert {sample["counts"]["ended"] for sample in samples} == {step_s / 2}


@pytest.mark.parametrize("milliseconds", [0.1, 1.0, 7.3, 250.0, 9_999.0, 1e6])
def test_a_class_of_durations_is_a_twentieth_wide(milliseconds: float) -> None:
    assert milliseconds_of(class_of(milliseconds)) == pytest.approx(milliseconds, rel=0.026)


def test_durations_out_of_all_bounds_still_have_a_class() -> None:
    assert class_of(0.0) == class_of(-1.0) == 0
    assert class_of(1e12) == class_of(1e6)


def test_figures_of_gateways_add_up_and_their_percentiles_are_of_all_requests() -> None:
    here, there = History(), History()
    for milliseconds in (10.0, 20.0):
        here.time(T, "ttft", milliseconds)
    there.time(T + 1, "ttft", 1000.0)
    here.count(T, ended=2, good=1, judged=2, prompt_tokens=100, cached_tokens=25)
    there.count(T, ended=1, good=1, judged=1, prompt_tokens=100, refused=1)
    for one in (here, there):
        one.look(T, {"in_flight": 3}, {"kv": 0.5, "workers": 2})
    parts = {"g0": here.as_json("10m"), "g1": there.as_json("10m")}
    picture = merged_history(parts, "10m", T + 2)
    series = {name: column[0] for name, column in picture["series"].items()}
    assert picture["at"] == [T]
    assert picture["gateways"] == {"g0": 2, "g1": 1}
    assert (series["ended"], series["refused"], series["in_flight"]) == (1.5, 0.5, 6)
    assert (series["kv"], series["workers"]) == (0.5, 2)  # all hear the same workers
    assert series["cached"] == 0.125
    assert series["goodput"] == pytest.approx(2 / 3, abs=1e-3)
    assert series["ttft_p50"] == pytest.approx(20, rel=0.05)
    assert series["ttft_p99"] == pytest.approx(1000, rel=0.05)
    assert series["tpot_p50"] is None


def test_levels_are_means_of_their_looks() -> None:
    history = History()
    for second, load in ((0, 2), (1, 4), (2, 0)):
        history.look(T + second, {"in_flight": load}, {"kv": load / 4})
    picture = merged_history({"g": history.as_json("10m")}, "10m", T + 4)
    assert picture["series"]["in_flight"] == [3, 0]
    assert picture["series"]["kv"] == [0.75, 0]


def test_a_sample_is_told_once_it_is_whole_and_each_once_to_who_says_what_it_has() -> None:
    history = History()
    for second in (0, 2, 8):
        history.count(T + second, ended=1)
    parts = {"g": history.as_json("10m")}
    assert merged_history(parts, "10m", T + 3)["at"] == [T]
    assert merged_history(parts, "10m", T + 10)["at"] == [T, T + 2, T + 4, T + 6, T + 8]
    assert merged_history(parts, "10m", T + 10)["series"]["ended"] == [0.5, 0.5, None, None, 0.5]  # it was not there
    assert merged_history(parts, "10m", T + 10, since=T + 2)["at"] == [T + 8]
    assert merged_history(parts, "10m", T + 10, since=T + 8)["at"] == []
    assert [one["at"] for one in history.as_json("10m", since=T + 2)] == [T + 8]


def test_a_clock_that_is_set_back_does_no_harm() -> None:
    history = History()
    for second in (0, 100, 40, 102):
        history.count(T + second, ended=1)
    assert [one["at"] - T for one in history.as_json("10m")] == [0, 100, 102]


# -- what is recorded ---------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return T + self.now


class Recorded:
    """A recorder over scripted generations, and requests that end when they are told."""

    def __init__(self) -> None:
        self.clock, self.refusals = Clock(), Refusals()
        self.generations = ScriptedGenerations(lambda _: [])
        self.recorder = Recorder(self.generations, self.refusals, clock=self.clock, wall=self.clock.wall)

    def line(self, name: str, *, received: float, first: float | None, tokens: int = 1) -> Timeline:
        made = Timeline(request_id=name, received_at=received, submitted_at=received, prompt_tokens=40, goal=GOAL)
        made.first_token_at, made.completion_tokens, made.cached_tokens = first, tokens, 10
        self.generations.timelines.start(made)
        return made

    def end(self, made: Timeline, at: float, **how: Any) -> None:
        made.ended_at, made.status = at, how.get("status", "stop")
        self.generations.timelines._running.pop(made.request_id)
        self.recorder.ended(made)

    def series(self, at: float) -> dict[str, Any]:
        picture = merged_history({"g": self.recorder.history.as_json("1h")}, "1h", T + at)
        return {name: column[0] for name, column in picture["series"].items()}


def test_a_first_token_is_counted_once_when_it_comes_and_not_when_its_answer_ends() -> None:
    all_ = Recorded()
    long = all_.line("long", received=0.0, first=0.5)
    all_.clock.now = 1.0
    all_.recorder.look([], [])
    all_.recorder.look([], [])
    short = all_.line("short", received=1.0, first=1.1)
    all_.clock.now = 1.5
    all_.end(short, 1.5)
    all_.clock.now = 3.0
    all_.recorder.look([], [])
    all_.end(long, 3.0)
    [sample] = all_.recorder.history.as_json("1h")
    assert sum(sample["ttft"].values()) == 2
    assert sample["counts"]["prompt_tokens"] == 80
    assert sample["counts"]["cached_tokens"] == 20


def test_goodput_is_what_met_both_levels() -> None:
    all_ = Recorded()
    all_.clock.now = 9.0
    all_.end(all_.line("good", received=0.0, first=0.9, tokens=11), 1.3)
    all_.end(all_.line("late", received=0.0, first=1.1, tokens=11), 1.3)
    all_.end(all_.line("slow", received=0.0, first=0.1, tokens=11), 1.3)
    all_.end(all_.line("failed", received=0.0, first=0.1), 0.2, status="error")
    all_.end(all_.line("left", received=0.0, first=None), 0.2, status="cancelled")  # nobody's fault
    patient = all_.line("patient", received=0.0, first=8.0)
    patient.patient = True
    all_.end(patient, 9.0)
    series = all_.series(10)
    assert series["goodput"] == 0.25
    assert (series["ended"], series["good"], series["errors"], series["cancelled"]) == (0.4, 0.1, 0.1, 0.1)


def test_refusals_are_counted_and_kept_within_a_bound() -> None:
    all_ = Recorded()
    where: Any = {"trace_id": "", "asker": ACME, "model": "m" * 999, "at": 0.0}
    for number in range(MAX_REFUSED + 5):
        all_.refusals.add(OverloadedError("full", retry_after_s=1.0), request_id=f"r{number}", **where)
    all_.refusals.add(InvalidRequestError("x" * 9999), request_id="wrong", **where)
    assert len(all_.refusals.newest()) == MAX_REFUSED
    assert all_.refusals.find("r0") is None
    newest = all_.refusals.newest()[0].as_json()
    assert (newest["request_id"], newest["status"], newest["tenant"]) == ("wrong", "refused", "acme")
    assert len(newest["model"]) <= 200
    assert len(newest["detail"]) < 600
    all_.recorder.look([], [])
    [sample] = all_.recorder.history.as_json("1h")
    assert (sample["counts"]["refused"], sample["counts"]["invalid"]) == (MAX_REFUSED + 5, 1)
    for error in (
        UnavailableError("nobody"),
        RateLimitedError("too many", retry_after_s=1.0, what="tokens", headers={}),
    ):
        all_.refusals.add(error, request_id="r", **where)
    assert all_.refusals.counts["refused"] == MAX_REFUSED + 7


def test_a_refused_request_has_all_that_a_summary_has() -> None:
    refusals = Refusals()
    refusals.add(UnavailableError("nobody"), request_id="r", trace_id="", asker=ACME, model="m", at=0.0)
    line = Timeline(request_id="x", received_at=0.0, submitted_at=0.0, prompt_tokens=1)
    own = {"received_at", "first_sent_at"}  # instants of the gateway's own clock
    assert set(line.summary()) - own == set(refusals.newest()[0].as_json()) - own


# -- events -------------------------------------------------------------------------------------------------------------


def worker(name: str, *, roles: str = "decode", status: str = "ready", incarnation: str = "1") -> dict[str, Any]:
    return {"id": name, "roles": roles.split(), "status": status, "incarnation": incarnation}


def heard(*workers: dict[str, Any], not_ready: str = "", refused: int = 0, why: str = "full") -> Heard:
    return Heard(
        workers={one["id"]: one for one in workers},
        gateways=frozenset({"g"}),
        not_ready=not_ready,
        refused=refused,
        refused_why=why,
    )


def texts(chronicle: Chronicle) -> list[str]:
    """Oldest first."""
    return [f"{one['level']} {one['what']}: {one['text']}" for one in reversed(chronicle.as_json())]


def test_a_lost_worker_is_an_event_and_is_shown_for_ten_minutes() -> None:
    chronicle = Chronicle()
    chronicle.look(heard(worker("p", roles="prefill"), worker("d")), T)
    chronicle.look(heard(worker("p", roles="prefill")), T + 5)
    assert texts(chronicle) == ["bad d: lost (decode)"]
    [lost] = chronicle.lost()
    assert (lost["id"], lost["lost_unix"]) == ("d", T + 5)
    chronicle.look(heard(worker("p", roles="prefill")), T + 4 + LOST_FOR_S)
    assert len(chronicle.lost()) == 1
    chronicle.look(heard(worker("p", roles="prefill")), T + 5 + LOST_FOR_S)
    assert chronicle.lost() == []


def test_workers_come_back_restart_move_drain_and_leave() -> None:
    chronicle = Chronicle()
    steps = [
        heard(worker("a")),
        heard(),
        heard(worker("a", incarnation="2")),
        heard(worker("a", incarnation="3")),
        heard(worker("a", incarnation="3", roles="prefill")),
        heard(worker("a", incarnation="3", roles="prefill", status="draining")),
        heard(),
    ]
    for second, step in enumerate(steps):
        chronicle.look(step, T + second)
    assert texts(chronicle) == [
        "bad a: lost (decode)",
        "good a: is back, restarted, after 1 s",
        "warn a: restarted",
        "info a: role moved: decode → prefill",
        "warn a: drains: no new work",
        "info a: left, after draining",
    ]
    assert chronicle.lost() == []  # it left as it was told to


def test_an_outage_says_since_when_and_how_long_it_was() -> None:
    chronicle = Chronicle()
    chronicle.look(heard(not_ready="no decode worker is ready"), T)
    assert chronicle.not_ready_since == T
    chronicle.look(heard(), T + 2)  # it only starts
    chronicle.look(heard(not_ready="no decode worker is ready"), T + 9)
    chronicle.look(heard(not_ready="no connection to NATS"), T + 10)
    assert chronicle.not_ready_since == T + 9
    chronicle.look(heard(), T + 39)
    assert chronicle.not_ready_since is None
    assert texts(chronicle) == [
        "good : requests are served",
        "bad : no request is served: no decode worker is ready",
        "good : requests are served again, after 30 s",
    ]


def test_refusals_near_each_other_are_one_event() -> None:
    chronicle = Chronicle()
    chronicle.look(heard(refused=7), T)
    chronicle.look(heard(refused=9), T + 1)
    chronicle.look(heard(refused=12, why="fuller"), T + 20)
    chronicle.look(heard(refused=12), T + 40)
    chronicle.look(heard(refused=13), T + 21 + QUIET_S)
    second, first = chronicle.as_json()
    assert (first["count"], first["at_unix"], first["until_unix"], first["text"]) == (5, T + 1, T + 20, "fuller")
    assert (second["count"], second["at_unix"]) == (1, T + 21 + QUIET_S)


def test_events_are_bounded_and_their_ids_never_repeat() -> None:
    chronicle = Chronicle()
    for number in range(2 * MAX_EVENTS):
        chronicle.look(heard(worker("a", incarnation=str(number))), T + number)
    ids = [one["id"] for one in chronicle.as_json()]
    assert len(ids) == len(set(ids)) == MAX_EVENTS


# -- planners -----------------------------------------------------------------------------------------------------------


def planned(
    planner: str = "p", *, acts: bool = True, reason: str = "no role is pressed", moves: int = 0
) -> PlannerState:
    counts = {"prefill": 1, "decode": 2}
    return PlannerState(
        planner=planner, acts=acts, workers=counts, desired=counts, pressures={"prefill": 0.1}, reason=reason, moves=moves
    )  # fmt: skip


def test_a_decision_is_kept_when_it_differs_from_the_one_before() -> None:
    decisions = Decisions()
    pressed = planned(reason="prefill is pressed: 1.20")
    for second, state in enumerate(
        [planned(), planned(), pressed, replace_reason(pressed, "prefill is pressed: 1.30")]
    ):
        decisions.saw(state, T + second)
    decisions.saw(planned(reason="prefill is pressed: 1.30", moves=1), T + 4)
    assert [(one["at_unix"] - T, one["moved"]) for one in decisions.as_json()] == [(4, True), (2, False), (0, False)]
    assert decisions.planners(T + 5)[0]["reason"] == "prefill is pressed: 1.30"
    assert decisions.planners(T + 99) == []


def replace_reason(state: PlannerState, reason: str) -> PlannerState:
    return msgspec.structs.replace(state, reason=reason)


def test_planners_and_decisions_are_bounded_and_the_one_that_acts_is_first() -> None:
    decisions = Decisions()
    for number in range(2 * MAX_PLANNERS):
        decisions.saw(planned(f"p{number:02}", acts=number == 9), T)
    assert len(decisions.planners(T)) == MAX_PLANNERS
    assert decisions.planners(T)[0]["planner"] == "p09"
    for moves in range(2 * MAX_DECISIONS):
        decisions.saw(planned("p00", moves=moves), T)
    assert len(decisions.as_json()) == MAX_DECISIONS


# -- the search ---------------------------------------------------------------------------------------------------------


def request(
    name: str, *, tenant: str = "acme", status: str = "stop", total_s: float = 1.0, at: float = 0.0
) -> Timeline:
    made = Timeline(request_id=name, received_at=0.0, submitted_at=0.0, prompt_tokens=4, model="demo")
    made.asker = Tenant(name=tenant, key="key-1")
    made.received_unix, made.status = T + at, status
    made.ended_at = None if status == "running" else total_s
    attempt = AttemptLine(number=1, began_at=0.0, because="", prefill="prefill-0", decode=["decode-0"], reason="load")
    made.attempts.append(attempt)
    made.traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    return made


LINES = [
    request("chatcmpl-one-0", at=1),
    request("chatcmpl-two-0", at=2, tenant="other", status="length", total_s=3.0),
    request("cmpl-three-0", at=3, status="error"),
    request("cmpl-four-0", at=4, status="running"),
]


def names(**query: str) -> list[str]:
    refusals = Refusals()
    refusals.add(
        UnavailableError("nobody is ready"), request_id="refused-5", trace_id="", asker=ACME, model="x", at=0.0
    )
    [refused] = refusals.newest()
    told = found(Wanted.of(query), LINES, [replace(refused, received_unix=T + 5, took_ms=2.0)], now=5.0)
    return [one["request_id"] for one in told]


@pytest.mark.parametrize(
    ("query", "suits"),
    [
        ({}, ["refused-5", "cmpl-four-0", "cmpl-three-0", "chatcmpl-two-0", "chatcmpl-one-0"]),
        ({"limit": "2"}, ["refused-5", "cmpl-four-0"]),
        ({"limit": "2", "order": "total"}, ["cmpl-four-0", "chatcmpl-two-0"]),
        ({"status": "done"}, ["chatcmpl-two-0", "chatcmpl-one-0"]),
        ({"status": "refused"}, ["refused-5"]),
        ({"status": "running"}, ["cmpl-four-0"]),
        ({"q": "THREE"}, ["cmpl-three-0"]),
        ({"q": "abababab"}, ["cmpl-four-0", "cmpl-three-0", "chatcmpl-two-0", "chatcmpl-one-0"]),
        ({"q": "nobody is"}, ["refused-5"]),
        ({"tenant": "other"}, ["chatcmpl-two-0"]),
        ({"key": "key-2"}, ["refused-5"]),
        ({"model": "x"}, ["refused-5"]),
        ({"worker": "prefill-0", "status": "error"}, ["cmpl-three-0"]),
        ({"worker": "prefill-9"}, []),
        ({"min_ms": "2000"}, ["cmpl-four-0", "chatcmpl-two-0"]),
    ],
)
def test_requests_are_found_by_what_is_known_of_them(query: dict[str, str], suits: list[str]) -> None:
    assert names(**query) == suits


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"status": "odd"}, "status: not one of waiting"),
        ({"min_ms": "x"}, "min_ms: a number"),
        ({"min_ms": "nan"}, "min_ms: a number"),
        ({"limit": "201"}, "limit: a number from 0 to 200"),
        ({"q": "x" * 999}, "q: longer than 200"),
        ({"order": "odd"}, "order: not one of newest"),
        ({"colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_a_wrong_search_is_told(query: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        Wanted.of(query)
