"""The figures of `benchmarks.load`: rows of a table and of a file, whoever served the load."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.load.cells import GOAL, Cell, chat
from benchmarks.load.figures import FILE, HEAD, Row, keep, read_rows
from benchmarks.load.model import Outcome, Run
from benchmarks.simulate.trace import TraceRequest

CELL = Cell("chat", "bf16", chat(8))


def run(*, first_ms: float, end_ms: float = 1000.0, refusal: str = "") -> Run:
    request = TraceRequest(0.0, prompt_tokens=100, answer_tokens=50, blocks=())
    return Run(request, GOAL, first_at=first_ms / 1000, end_at=end_ms / 1000, refusal=refusal)


def row(*runs: Run, system: str = "baton") -> Row:
    outcome = Outcome(runs, passes=0, preemptions=2, plan_ms=0.0)
    return Row.of(CELL, outcome, system=system, source="measured", where="a card", seconds=1.0)


def test_what_was_refused_has_no_times_and_is_not_good() -> None:
    found = row(run(first_ms=20), run(first_ms=500, end_ms=2000), run(first_ms=0, refusal="503"))
    assert (found.requests, found.refused, found.good) == (3, 1, 0.3333)
    assert found.ttft_ms == (500, 500, 500)
    assert found.per_second == 1.0


def test_nothing_served_is_no_request_a_second() -> None:
    found = row(run(first_ms=0, refusal="503"))
    assert (found.good, found.per_second, found.ttft_ms) == (0, 0, (0, 0, 0))


def test_a_row_of_the_table_has_the_columns_of_its_head() -> None:
    assert str(row(run(first_ms=20))) == "| chat | baton | 20 / 20 / 20 | 20.0 / 20.0 / 20.0 | 1.00 | 1.00 | 0 | 2 |"
    assert HEAD.splitlines()[0].count("|") == str(row(run(first_ms=20))).count("|")


def test_a_file_keeps_the_latest_row_of_each_load_and_server(tmp_path: Path) -> None:
    rows = [row(run(first_ms=20)), row(run(first_ms=30), system="another"), row(run(first_ms=40))]
    for each in rows:
        keep(each, tmp_path / "new")
    assert read_rows(tmp_path / "new" / FILE) == rows[1:]
    assert msgspec.json.decode((tmp_path / "new" / FILE).read_bytes())[0]["system"] == "another"
    keep(rows[0], None)
    assert read_rows(tmp_path / FILE) == []
