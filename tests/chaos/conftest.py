"""One tiny model for all of chaos, and its oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.asks import Oracle
from tests.models import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)
