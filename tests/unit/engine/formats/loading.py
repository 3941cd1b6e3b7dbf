"""Engines over quantised checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.model.decoder import Decoder
from engine.weights.loader import load_weights
from tests.models import build_tiny_model
from tests.unit.engine.families.experts import CASES
from tests.unit.engine.formats.checkpoints import Store
from tests.unit.engine.generate import Generator, new_sequence

MOE = next(case for case in CASES if case.name == "qwen3_moe")
PROMPT = list(range(40, 75))
Tiny = Callable[[str], Path]


@dataclass(frozen=True)
class Form:
    """A way to write a checkpoint."""

    family: str
    store: Store
    config: Mapping[str, Any]
    keeps: tuple[str, ...] = ()


def answer(folder: Path, **config: Any) -> list[int]:
    """Token ids of an engine's answer to a prompt, in the checkpoint's numbers unless a dtype is asked for."""
    engine = Engine(EngineConfig.of(model=folder, num_blocks=24, **{"dtype": "float32", **config}))
    return Generator(engine).run([new_sequence("one", PROMPT)])[0]


def loaded(folder: Path, **options: Any) -> Decoder:
    spec = read_model_spec(folder, **options)
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_weights(decoder.weights, folder)
    return decoder


def single(tiny_model: Tiny, family: str, tmp_path: Path) -> Path:
    """A family's checkpoint in one file, with a tensor for each expert."""
    if family == "qwen3_moe":
        return MOE.build(tmp_path / "moe")
    return build_tiny_model(tmp_path / "qwen3", family) if family == "qwen3" else tiny_model(family)
