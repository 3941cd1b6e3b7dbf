"""Triton's interpreter, for the checks of one worker of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.needs import needs
from tests.unit.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    needs("triton")
    running = Interpreter()
    yield running
    running.end()
