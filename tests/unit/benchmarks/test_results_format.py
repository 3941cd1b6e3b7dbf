"""The form of results: what is refused, what is computed, what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from benchmarks.results_format import MAX_OTHERS, Result, ResultsPage, markdown, notes_of, number, read_results

STEP = Result(name="step", value=5.0, unit="ms", better="lower", target=4.0, floor=2.0, reference=6.0)
RATE = Result(name="rate", value=45.0, unit="req/s", better="higher", target=40.0, floor=90.0, reference=50.0)
PLAIN = Result(name="plain", value=0.0, unit="tokens", better="lower")


def test_a_lower_value_is_better_for_a_time() -> None:
    assert STEP.met is False
    assert STEP.fraction_of_floor == pytest.approx(0.4)
    assert STEP.excess(4.0) == pytest.approx(0.25)
    assert STEP.excess(6.0) < 0


def test_a_higher_value_is_better_for_a_rate() -> None:
    assert RATE.met is True
    assert RATE.fraction_of_floor == pytest.approx(0.5)
    assert RATE.excess(50.0) == pytest.approx(0.1)


def test_nothing_is_met_and_no_floor_is_near_where_there_is_none() -> None:
    assert PLAIN.met is None
    assert PLAIN.fraction_of_floor is None


def test_what_should_not_happen_at_all_has_the_target_zero() -> None:
    none, some = (Result(name="lost", value=value, unit="tokens", better="lower", target=0) for value in (0, 2))
    assert (none.met, some.met) == (True, False)
    assert "2.00 tokens too many" in markdown([none, some], title="t", facts={})


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"unit": ""},
        {"value": float("nan")},
        {"target": -1.0},
        {"target": 0.0, "better": "higher"},
        {"floor": 0.0},
        {"floor": -1.0},
        {"reference": float("inf")},
    ],
)
def test_a_result_without_meaning_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        msgspec.structs.replace(STEP, **wrong)


def test_a_new_run_keeps_the_notes_of_the_page(tmp_path: Path) -> None:
    assert notes_of("engine", tmp_path) == ""
    ResultsPage(tmp_path, "engine", title="T", facts={}, notes="## Notes\n\nBy hand.\n\n### More\n").add(STEP)
    notes = notes_of("engine", tmp_path)
    ResultsPage(tmp_path, "engine", title="T", facts={}, notes=notes).add(RATE)
    assert notes_of("engine", tmp_path) == notes == "## Notes\n\nBy hand.\n\n### More\n"


def test_files_hold_what_was_added_after_every_result(tmp_path: Path) -> None:
    page = ResultsPage(tmp_path / "new", "engine", title="T", facts={"date": "today"}, notes="## Why\n\nBecause.")
    page.add(STEP)
    assert read_results(tmp_path / "new/engine.json") == [STEP]
    page.state("device", "none")
    page.remarks.append("one cell left out")
    page.add(RATE, PLAIN)
    assert read_results(tmp_path / "new/engine.json") == [STEP, RATE, PLAIN]
    fields = json.loads((tmp_path / "new/engine.json").read_bytes())[2]
    assert fields == {
        "name": "plain",
        "value": 0.0,
        "unit": "tokens",
        "better": "lower",
        "target": None,
        "floor": None,
        "reference": None,
    }
    text = (tmp_path / "new/engine.md").read_text()
    for part in ("# T", "- date: today", "- device: none", "one cell left out", "Because."):
        assert part in text
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["engine.json", "engine.md"]


def test_a_name_is_given_once(tmp_path: Path) -> None:
    page = ResultsPage(tmp_path, "engine", title="T", facts={}).add(STEP)
    with pytest.raises(ValueError, match="step"):
        page.add(STEP)


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"name": "a", "value": 1, "unit": "s", "better": "more"}]')
    with pytest.raises(msgspec.ValidationError):
        read_results(tmp_path / "x.json")


def test_the_page_says_what_was_missed_and_by_how_much() -> None:
    text = markdown([STEP, RATE, PLAIN], title="T", facts={})
    missed, rest = text.split("## Targets")
    targets, others = rest.split("## Also measured")
    assert "| step | 5.00 | ms | 4.00 | **missed** | 2.00 | 40% | 6.00 | 16.7% better |" in targets
    assert "| rate | 45.0 | req/s | 40.0 | met | 90.0 | 50% | 50.0 | 10.0% worse |" in targets
    assert "| plain | 0 |" in others
    assert missed.startswith("# T\n\n\n**1 of 2 targets are met.**")
    assert missed.endswith("## Missed\n\n- step: 5.00 ms, target 4.00: 1.00 ms (25.0%) short\n\n")


def test_what_should_not_happen_and_did_not_is_counted_by_kind() -> None:
    none = [Result(name=f"case {n}: lost", value=0, unit="tokens", better="lower", target=0) for n in range(3)]
    some = Result(name="case 3: lost", value=2, unit="tokens", better="lower", target=0)
    text = markdown([*none, some], title="T", facts={}, file="t.json")
    assert "| lost | 3 |" in text
    assert "case 0" not in text
    assert "| case 3: lost | 2.00 |" in text


def test_a_page_shows_one_screen_of_figures_without_a_target() -> None:
    many = [Result(name=f"r{n}", value=1, unit="ms", better="lower") for n in range(MAX_OTHERS + 5)]
    text = markdown(many, title="T", facts={}, file="t.json")
    assert len(re.findall(r"\| r\d+ ", text)) == MAX_OTHERS
    assert "5 more are in `t.json`" in text


def test_a_target_that_physics_forbids_is_named() -> None:
    beyond = [msgspec.structs.replace(STEP, target=1.5), msgspec.structs.replace(RATE, target=100.0)]
    assert [result.target_beyond_floor for result in (*beyond, STEP, RATE, PLAIN)] == [True, True, False, False, False]
    text = markdown(beyond, title="T", facts={})
    assert text.count("the target lies beyond the floor") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (3.6412, "3.64"),
        (43_512.3, "43,512"),
        (0.01234, "0.0123"),
        (789.4, "789"),
        (-2.5, "-2.50"),
    ],
)
def test_numbers_have_three_digits_that_mean_something(value: float | None, text: str) -> None:
    assert number(value) == text
