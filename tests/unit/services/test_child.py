"""The parts of `baton up` that need no server: how it names an end, how long it waits before a restart."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cli.requirements import requirements
from common.settings import ROOT
from services.host.child import MAX_TAIL_BYTES, describe_exit, last_lines, why_ended
from services.runtime.commands import python_path
from services.up.settings import devices_of, gpus_of
from services.up.stack import LONGEST_PAUSE_S, restart_pause_s


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (2, "exit code 2"), (-signal.SIGKILL, "signal SIGKILL"), (-999, "signal 999")],
)
def test_an_end_is_described(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_restart_pauses_grow_and_are_bounded() -> None:
    pauses = [restart_pause_s(deaths) for deaths in range(1, 20)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0 < pauses[1] < 1
    assert pauses[-1] == LONGEST_PAUSE_S


def test_children_find_baton_first_then_what_the_person_wanted(tmp_path: Path) -> None:
    theirs = os.pathsep.join(("/one", str(ROOT), "/two"))
    assert python_path({"PYTHONPATH": theirs}) == {
        "PYTHONPATH": os.pathsep.join((str(ROOT), "/one", "/two")),
        "PYTHONSAFEPATH": "1",
    }
    assert python_path({})["PYTHONPATH"] == str(ROOT)


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log, 2) == []
    log.write_bytes(b"one\ntwo\n\xffthree\n")
    assert last_lines(log, 2) == ["two", "\ufffdthree"]


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("", ""),
        ("12:00 started\nbaton: --model x: no such\n", "--model x: no such"),
        (
            "baton: the type `foo` is not known.\n\nYou can update with `pip install`",
            "the type `foo` is not known. You can update with `pip install`",
        ),
        ("baton: warning: a variable\nTraceback (most recent call last):\n  File x\nKeyError: 'y'\n", "KeyError: 'y'"),
    ],
)
def test_an_error_of_several_lines_is_told_whole(tmp_path: Path, log: str, why: str) -> None:
    (tmp_path / "log").write_text(log)
    assert why_ended(tmp_path / "log") == why


def test_requirements_are_those_of_the_project_and_of_the_extras_asked_for() -> None:
    serving = requirements(["gateway", "worker"])
    assert any(line.startswith("torch") for line in serving)
    assert not any(line.startswith("torch") for line in requirements(["gateway"]))
    assert not any(line.startswith("pytest") for line in serving)
    with pytest.raises(KeyError):
        requirements(["no-such-extra"])


@pytest.mark.parametrize(
    ("devices", "widths", "dealt", "used"),
    [
        ("cpu", [1, 1, 2], ["cpu"] * 3, None),
        ("cuda", [1, 1, 1], ["cuda:0", "cuda:1", "cuda:2"], [0, 1, 2]),
        ("cuda:2,cuda:5", [1, 1], ["cuda:2", "cuda:5"], [2, 5]),
        ("cuda:2,cuda:5", [1, 1, 1], ["cuda:2", "cuda:5", "cuda:2"], [2, 5, 2]),
        ("cuda", [2, 2, 1], ["cuda:0", "cuda:2", "cuda:4"], [0, 1, 2, 3, 4]),
        ("cuda:4,cuda:0", [2, 4], ["cuda:4", "cuda:0"], [4, 5, 0, 1, 2, 3]),
        ("cuda", [], [], []),
    ],
)
def test_devices_are_dealt_out_in_order(
    devices: str, widths: list[int], dealt: list[str], used: list[int] | None
) -> None:
    assert devices_of(devices, widths) == dealt
    assert used is None or gpus_of(devices, widths) == [f"cuda:{index}" for index in used]


def test_of_a_large_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with log.open("wb") as opened:
        opened.truncate(1 << 36)  # no more than its end could be read
        opened.seek(0, os.SEEK_END)
        opened.write(b"\nfirst\nbaton: no room\n")
    assert last_lines(log, 2) == ["first", "baton: no room"]
    assert why_ended(log) == "no room"
    log.write_bytes(b"x" * 3 * MAX_TAIL_BYTES)
    assert [len(line) for line in last_lines(log, 2)] == [MAX_TAIL_BYTES]
