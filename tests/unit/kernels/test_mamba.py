"""Mamba-2's scan and gate: their reference and their Triton kernels."""

from __future__ import annotations

import pytest

from tests.unit.kernels import mamba_checks
from tests.unit.kernels.interpreter import Interpreter

SMALL = ("small", "bounded", "odd", "groups")


@pytest.mark.parametrize("name", SMALL)
def test_the_reference(name: str) -> None:
    mamba_checks.run(name, "cpu")


@pytest.mark.parametrize("name", SMALL)
def test_the_kernels(interpreter: Interpreter, name: str) -> None:
    interpreter.check("mamba_checks", name)
