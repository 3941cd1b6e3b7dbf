"""Fixtures of tests on GPUs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def freed() -> Iterator[None]:
    """Memory of the device is free again after the test."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
