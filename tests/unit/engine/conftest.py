"""Tiny models, engines over them, and a minimal loop that drives an engine without a worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from tests.models import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny checkpoint, built once. Qwen3's is sharded."""
    built: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in built:
            shards = 3 if family == "qwen3" else 1
            built[family] = build_tiny_model(tmp_path_factory.mktemp(family), family, shards=shards)
        return built[family]

    return folder


@pytest.fixture(scope="session")
def tiny_engine(tiny_model: Callable[[str], Path]) -> Callable[[str], Engine]:
    """An engine with 160 blocks whose pool starts full of NaN: what was never written must never matter."""
    started: dict[str, Engine] = {}

    def nan_pool(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    def engine(family: str) -> Engine:
        if family not in started:
            started[family] = Engine(
                EngineConfig(model=tiny_model(family), cache=CacheConfig(num_blocks=160)), allocate=nan_pool
            )
        return started[family]

    return engine
