"""Freed memory goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.memory import give_back

ROOT = Path(__file__).parents[3]
FREES = """
import re
from services.runtime.memory import give_back
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
kept, freed = [], []
for _ in range(4000):  # below the size that malloc maps by itself; what is kept lies between
    freed.append(bytearray(20_000))
    kept.append(bytearray(600))
freed.clear()
before = resident()
give_back()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_what_was_freed_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", FREES], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) > 40_000, "kB of the 80,000"


def test_it_may_be_called_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    give_back()
