"""Triton's interpreter, for the checks of one worker of pytest."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.unit.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: it is for Linux only")
    running = Interpreter()
    yield running
    running.end()
