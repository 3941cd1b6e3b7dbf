"""What the process that checks kernels says of a check that fails, or that ends it."""

from __future__ import annotations

import pytest

from tests.unit.kernels.interpreter import Interpreter


def test_a_failed_check_says_why(interpreter: Interpreter) -> None:
    with pytest.raises(AssertionError, match="KeyError: 'no such kernel'"):
        interpreter.check("triton_checks", "no such kernel")


def test_a_check_that_ends_the_process_fails_and_the_next_one_runs(interpreter: Interpreter) -> None:
    with pytest.raises(AssertionError, match="the process ended"):
        interpreter.check("ends", "")
    interpreter.check("triton_checks", "embedding")
