"""The paged prefill kernel in Triton's interpreter. Each check is a process of its own: the switch holds for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.models import build_tiny_model

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: it is for Linux only")
@pytest.mark.parametrize("name", ["ragged", "windows", "head_sizes", "random", "plan"])
def test_paged_prefill(name: str) -> None:
    run("tests.unit.kernels.prefill_checks", name)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: it is for Linux only")
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_pass_in_a_larger_graph(family: str, tmp_path: Path) -> None:
    run("tests.unit.kernels.graph_checks", str(build_tiny_model(tmp_path / family, family)))


def run(module: str, argument: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, argument],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
