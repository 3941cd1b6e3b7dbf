"""Trees of syntax, which all tests of the house read: they are kept to the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def kept_trees() -> Iterator[None]:
    """No collection looks through the trees, neither while they grow nor later."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
