"""Models that pool compute by the kernels of GPUs what transformers does."""

from __future__ import annotations

import pytest

from tests.unit.kernels.interpreter import Interpreter
from tests.unit.kernels.pooled_checks import ROTATED


@pytest.mark.parametrize("family", ROTATED)
def test_vectors_in_the_interpreter(interpreter: Interpreter, family: str) -> None:
    interpreter.check("pooled_checks", family)
