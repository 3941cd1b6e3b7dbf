"""A start with an empty cache compiles every kernel ahead, several at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _compiled(cache: Path) -> list[tuple[str, str, bool]]:
    child = subprocess.run(
        [sys.executable, "-m", "tests.gpu.starting", "models/demo"],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert child.returncode == 0, child.stderr
    return [(name, thread, cached) for name, thread, cached in json.loads(child.stdout.splitlines()[-1])]


def test_everything_is_compiled_ahead(tmp_path: Path) -> None:
    first = _compiled(tmp_path)
    assert len({name for name, _, _ in first}) > 10
    late = [(name, thread) for name, thread, cached in first if thread != "compile"]
    assert not late, "a launch had to wait for these"
    assert all(cached for _, _, cached in _compiled(tmp_path))
