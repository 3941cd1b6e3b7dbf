"""The table of silences: every row, its border, and the page that shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.lifecycle.silence import ANY_PHASE, RULES, Action, Measure, Need, Patience, Rule, Silence, diagnose, rules
from gateway.request.state import Phase

PAGE = Path(__file__).resolve().parents[4] / "docs/failures.md"
HEADING = "## Nothing is heard of a request"

CALM = Silence(phase=Phase.DECODING, progress_s=0.0, known_s=0.0)


def silence_of(rule: Rule, phase: Phase, seconds: float) -> Silence:
    """The silence that the rule is about and, besides, all that it needs."""
    lasting = {
        Measure.GAP: {"gap_s": seconds},
        Measure.PROGRESS: {"progress_s": seconds},
        Measure.WORD: {"progress_s": seconds, "known_s": seconds},
    }[rule.measure]
    return replace(
        CALM,
        phase=phase,
        has_queued_job=rule.need is Need.QUEUED_JOB,
        has_other_prefiller=rule.need is Need.ANOTHER_PREFILLER,
        **lasting,
    )


ROWS = [
    pytest.param(rule, phase, id=f"{phase.value}: {rule.action.value}: {rule.longer_than_s:g} s")
    for rule in RULES
    for phase in rule.phases
]


@pytest.mark.parametrize(("rule", "phase"), ROWS)
def test_a_row_applies_after_its_time_and_not_before(rule: Rule, phase: Phase) -> None:
    assert diagnose(silence_of(rule, phase, rule.longer_than_s + 1e-6)) == (rule.action, rule.end)
    assert diagnose(silence_of(rule, phase, rule.longer_than_s)) != (rule.action, rule.end)


@pytest.mark.parametrize(("rule", "phase"), [row for row in ROWS if row.values[0].need is not Need.NOTHING])  # type: ignore[union-attr]
def test_a_row_with_a_condition_needs_it(rule: Rule, phase: Phase) -> None:
    silence = silence_of(rule, phase, rule.longer_than_s + 1e-6)
    assert diagnose(replace(silence, has_queued_job=False, has_other_prefiller=False)) == (Action.WAIT, None)


@pytest.mark.parametrize("phase", Phase)
def test_a_request_that_was_heard_just_now_is_left_alone(phase: Phase) -> None:
    everything = replace(CALM, phase=phase, has_queued_job=True, has_other_prefiller=True)
    assert diagnose(everything) == (Action.WAIT, None)


def test_a_request_that_is_over_is_left_alone_however_long_ago_that_was() -> None:
    assert diagnose(replace(CALM, phase=Phase.ENDED, progress_s=1e9, known_s=1e9)) == (Action.WAIT, None)


@pytest.mark.parametrize(
    ("silence", "action"),
    [
        ({"phase": Phase.DECODING, "progress_s": 60.0, "gap_s": 6.0}, Action.MOVE),  # what is missing comes first
        ({"phase": Phase.CLAIMED, "progress_s": 60.0, "known_s": 60.0, "gap_s": 0.3}, Action.ASK_DECODER),
        ({"phase": Phase.PREFILLED, "progress_s": 16.0, "known_s": 0.1}, Action.MOVE),  # known, and yet nobody decodes
        ({"phase": Phase.PREFILLED, "progress_s": 14.0, "known_s": 14.0}, Action.ASK_CLAIMER),
        ({"phase": Phase.CLAIMED, "progress_s": 60.0, "known_s": 0.1}, Action.WAIT),  # it said that it computes
        ({"phase": Phase.CLAIMED, "progress_s": 0.1, "known_s": 60.0}, Action.WAIT),
        ({"phase": Phase.QUEUED, "progress_s": 11.0, "known_s": 11.0, "has_queued_job": True}, Action.LOOK_FOR_JOB),
        (
            {"phase": Phase.QUEUED, "progress_s": 11.0, "known_s": 1.0, "has_other_prefiller": True},
            Action.MOVE_ELSEWHERE,
        ),
    ],
)
def test_the_first_row_that_applies_decides(silence: dict[str, object], action: Action) -> None:
    assert diagnose(replace(CALM, **silence))[0] is action  # type: ignore[arg-type]


def test_every_time_is_a_field_of_the_policy() -> None:
    slow = Patience(**{name: 100.0 + number for number, name in enumerate(Patience.__dataclass_fields__)})
    times = [rule.longer_than_s for rule in rules(slow)]
    assert sorted(times) == [100.0 + number for number in range(len(RULES))]


def test_the_page_shows_the_same_table() -> None:
    section = PAGE.read_text().partition(HEADING)[2].partition("\n## ")[0]
    shown = [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    assert shown[2:] == [
        [
            "any" if rule.phases == ANY_PHASE else ", ".join(phase.value for phase in rule.phases),
            rule.measure.value,
            f"{rule.longer_than_s:g} s",
            rule.need.value,
            rule.action.value,
            rule.why,
        ]
        for rule in RULES
    ]
