"""Kernels compiled ahead: by Triton itself, for a GPU that isn't there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compilations import told_by
from tests.needs import needs

LAUNCHES = ["_norm", "_norm", "_few_rows", "_few_rows"]


@pytest.mark.long
def test_kernels_are_compiled_once_and_ahead(tmp_path: Path) -> None:
    needs("triton")
    broken, ahead, wrong, after = told_by("tests.unit.kernels.compiling", cache=tmp_path, timeout_s=120)
    assert len(broken[0]) < 39, "after an error nothing more is begun"
    assert broken[1] == []
    assert sorted(ahead[0]) == sorted([name, "compile", False] for name in LAUNCHES), (
        "each variant once, by the threads"
    )
    assert ahead[1] == [], "nothing is launched"
    assert wrong == [[], ["why not"]], "what can't be compiled is told where it is launched"
    assert after == [[], LAUNCHES]
    _, cached, _, _ = told_by("tests.unit.kernels.compiling", cache=tmp_path, timeout_s=120)
    assert sorted(cached[0]) == sorted([name, "compile", True] for name in LAUNCHES)
