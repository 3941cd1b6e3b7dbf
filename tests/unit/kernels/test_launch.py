"""Kernels compiled ahead: by Triton itself, for a GPU that isn't there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAUNCHES = ["_norm", "_norm", "_few_rows", "_few_rows"]


def _steps(cache: Path) -> list[list[list[object]]]:
    child = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.compiling"],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    steps: list[list[list[object]]] = json.loads(child.stdout)
    return steps


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: it is for Linux only")
def test_kernels_are_compiled_once_and_ahead(tmp_path: Path) -> None:
    broken, ahead, wrong, after = _steps(tmp_path)
    assert len(broken[0]) < 39, "after an error nothing more is begun"
    assert broken[1] == []
    assert sorted(ahead[0]) == sorted([name, "compile", False] for name in LAUNCHES), (
        "each variant once, by the threads"
    )
    assert ahead[1] == [], "nothing is launched"
    assert wrong == [[], ["why not"]], "what can't be compiled is told where it is launched"
    assert after == [[], LAUNCHES]
    _, cached, _, _ = _steps(tmp_path)
    assert sorted(cached[0]) == sorted([name, "compile", True] for name in LAUNCHES)
