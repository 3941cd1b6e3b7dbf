"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.console.browser import run_browser
from tests.e2e.stack import Start, up
from tests.models import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama: the fake device needs its config.json and its tokenizer."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Start:
    """`baton up` with that model, each time with the same data folder."""
    return partial(up, model, tmp_path / "data")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    async with run_browser() as running:
        yield running
