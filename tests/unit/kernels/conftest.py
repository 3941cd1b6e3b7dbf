"""Triton's interpreter, for the checks of one worker of pytest, and threads for kernels in C."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.needs import needs
from tests.unit.kernels.interpreter import Interpreter


@pytest.fixture
def threads() -> Iterator[None]:
    """Threads for the kernels in C, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    needs("triton")
    running = Interpreter()
    yield running
    running.end()
