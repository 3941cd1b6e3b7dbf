"""Kernels far from the start of tensors that are larger than 2^31 elements, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.unit.kernels import far_checks
from tests.unit.kernels.interpreter import Interpreter


@pytest.mark.parametrize("name", far_checks.CHECKS)
def test_far_from_the_start_it_computes_the_same(interpreter: Interpreter, name: str) -> None:
    interpreter.check("far_checks", name)


def test_an_offset_of_32_bits_is_told(interpreter: Interpreter) -> None:
    with pytest.raises(AssertionError, match=r"far from the start it computes something else|the process ended"):
        interpreter.check("far_checks", "broken")
