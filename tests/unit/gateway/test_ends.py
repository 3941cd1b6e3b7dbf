"""What counts against a request: the table of ends, its page, and what follows from counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import PlaceAgainError, QuarantinedError, StepFailedError, UnavailableError, WorkerFailedError
from gateway.request.ends import MAX_FAILED, MAX_HARMED, MAX_PAUSE_S, End, Sign, pause_s, verdict

PAGE = Path(__file__).resolve().parents[3] / "docs/failures.md"


def test_only_what_may_have_harmed_a_worker_leads_to_quarantine() -> None:
    assert [end for end in End if end.sign is Sign.HARMED] == [End.PASS_FAILED]
    assert verdict(failed=MAX_FAILED - 1, harmed=MAX_HARMED - 1) is None
    assert isinstance(verdict(failed=0, harmed=MAX_HARMED), QuarantinedError)
    assert isinstance(verdict(failed=10 * MAX_FAILED, harmed=0), UnavailableError)


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (PlaceAgainError.code, End.PLACE_AGAIN),
        (StepFailedError.code, End.PASS_FAILED),
        (WorkerFailedError.code, End.WORKER_FAILED),
        ("of a newer release", End.WORKER_FAILED),
    ],
)
def test_what_a_worker_reports_is_one_of_them(code: str, end: End) -> None:
    assert End.of_code(code) is end


def test_pauses_grow_up_to_a_bound() -> None:
    pauses = [pause_s(End.WORKER_FAILED, number) for number in range(1, 40)]
    assert pause_s(End.STOPPED, 40) == 0 < pause_s(End.PLACE_AGAIN, 40)
    assert pauses == sorted(pauses)
    assert (pauses[:2], pauses[2], pauses[-1]) == ([0.0, 0.0], 0.1, MAX_PAUSE_S)


def test_the_page_shows_the_same_table() -> None:
    section = PAGE.read_text().partition("## What counts against a request")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert [[row[0], row[-1]] for row in rows[2:]] == [[end.text, end.sign.value] for end in End]
