"""A start with an empty cache compiles every kernel ahead, several at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compilations import told_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_everything_is_compiled_ahead(tmp_path: Path) -> None:
    first, again = (told_by("tests.gpu.starting", "demo", cache=tmp_path, timeout_s=180) for _ in range(2))
    assert len({name for name, _, _ in first}) > 10
    late = [(name, thread) for name, thread, cached in first if thread != "compile"]
    assert not late, "a launch had to wait for these"
    assert all(cached for _, _, cached in again)
