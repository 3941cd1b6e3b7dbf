"""`baton up` as benchmarks start it: until it serves, and until it has stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.up import serving

SERVES = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (print("stopped", flush=True), sys.exit()))
print("Baton serves m", flush=True)
time.sleep(600)
"""


def test_it_runs_from_when_it_serves_until_it_has_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving([sys.executable, "-c", SERVES], cwd=tmp_path, log=log, ready_s=60):
        assert log.read_text() == "Baton serves m\n"
    assert log.read_text() == "Baton serves m\nstopped\n"


def test_one_that_ends_before_it_serves_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no model')"]
    with (
        pytest.raises(RuntimeError, match="no model"),
        serving(command, cwd=tmp_path, log=tmp_path / "log", ready_s=60),
    ):
        raise AssertionError("it never served")
