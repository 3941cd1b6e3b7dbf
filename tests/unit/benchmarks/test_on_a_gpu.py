"""What runs in one call: in order, within limits, whatever fails; and each step's command is one that its program takes."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from benchmarks import on_a_gpu
from benchmarks.engine.cells import FULL
from benchmarks.environment import NEEDS_A_CARD, ROOT
from benchmarks.on_a_gpu import LIMIT_S, OUT, PARTS, STEPS, Run, Step, parts_of, run_step
from benchmarks.weights.drawn import DRAWN
from tests.unit.benchmarks.steps import run

HARMLESS = "json.tool"


def printing(name: str, *, estimate_s: float = 60) -> Step:
    """It writes a result, and says so."""
    return Step(name, ("timeit", "-n1", "-r1", f"open({OUT + '/' + name!r}, 'w').write('x')"), estimate_s)


def waiting(name: str) -> Step:
    return Step(name, ("timeit", "-n1", "-r1", "__import__('threading').Event().wait()"), 60)


def names_in(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        return {Path(name).name for name in opened.getnames()}


def test_a_step_that_fails_stops_no_other(tmp_path: Path) -> None:
    failing = Step("failing", (HARMLESS, "/nowhere"), 60)
    outcomes = Run(tmp_path, "part-1", limit_s=600).all([printing("first"), failing, printing("last")])
    assert [(each.step.name, each.state) for each in outcomes] == [
        ("first", "done"), ("failing", "failed, exit code 2"), ("last", "done")
    ]  # fmt: skip
    page = (tmp_path / "part-1.md").read_text()
    assert "| failing | failed, exit code 2 |" in page
    assert "No such file" in page
    assert names_in(tmp_path / "part-1.tar.gz") >= {"first", "first.log", "failing.log", "last", "last.log"}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_step_over_its_time_is_ended(tmp_path: Path) -> None:
    assert run_step(waiting("slow"), tmp_path, limit_s=1).state == "ended after 1 s"


def test_what_would_not_end_in_time_makes_way_for_what_does(tmp_path: Path) -> None:
    outcomes = Run(tmp_path, "part-1", limit_s=50).all([printing("long"), printing("short", estimate_s=1)])
    assert [each.state for each in outcomes] == ["left out, no time", "done"]
    assert "| long | left out, no time | 0 | 60 |" in (tmp_path / "part-1.md").read_text()


def test_each_result_is_kept_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[set[str]]()

    def run_and_look(step: Step, results: Path, *, limit_s: float) -> on_a_gpu.Outcome:
        seen.append(names_in(tmp_path / "part-1.tar.gz") if seen else set())
        return run_step(step, results, limit_s=limit_s)

    monkeypatch.setattr(on_a_gpu, "run_step", run_and_look)
    Run(tmp_path, "part-1", limit_s=600).all([printing("first"), printing("second")])
    assert "first" in seen[1]


def test_parts_hold_all_steps_in_order_and_have_room_for_them() -> None:
    parts = parts_of(STEPS, PARTS, LIMIT_S)
    assert all(sum(step.estimate_s for step in part) <= LIMIT_S for part in parts)
    assert sorted(step.name for part in parts for step in part) == sorted(step.name for step in STEPS)
    assert all(part == sorted(part, key=STEPS.index) for part in parts)
    assert parts[0][0] is STEPS[0]
    one, two, three = (printing(name, estimate_s=size) for name, size in (("a", 6), ("b", 6), ("c", 4)))
    assert parts_of([one, two, three], 2, 10) == [[one, three], [two]]


def test_part_and_also_choose_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_a_gpu, "STEPS", tuple(printing(name) for name in "abc"))
    arguments = ["--out", str(tmp_path), "--limit-s", "120", "--part", "2/2", "--also", "^a"]
    assert on_a_gpu.main(arguments) == 0
    assert names_in(tmp_path / "part-2.tar.gz") >= {"c", "a"}
    assert "b" not in names_in(tmp_path / "part-2.tar.gz")


def test_pages_name_the_commit() -> None:
    assert [step.name for step in STEPS if step.of("abc").command[-2:] == ("--commit", "abc")] == [
        step.name for step in STEPS if step.command[0] == "benchmarks.engine"
    ]


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "one/3"])
def test_a_part_that_is_none_is_refused(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        on_a_gpu.main(["--out", "/nowhere", "--part", part])
    assert f"'{part}' is no part such as 1/3" in capsys.readouterr().err


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_without_a_card_a_step_gets_as_far_as_saying_so(step: Step, tmp_path: Path) -> None:
    module, *arguments = (word.replace(OUT, str(tmp_path)) for word in step.of("abc").command)
    if module == "pytest":
        assert (ROOT / arguments[-1]).is_dir()
        return
    with pytest.raises(SystemExit, match=NEEDS_A_CARD):
        run(module, arguments)


def test_cells_and_shapes_of_steps_exist() -> None:
    for step in STEPS:
        if "--cells" in step.command:
            cells = step.command[step.command.index("--cells") + 1]
            assert any(re.search(cells, cell.name) for cell in FULL), step.name
    shapes = {step.command[step.command.index("--shape") + 1] for step in STEPS if "--shape" in step.command}
    assert shapes == set(DRAWN)
