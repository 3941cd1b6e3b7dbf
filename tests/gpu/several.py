"""Engines of several processes on the cards that there are: on one each, or all on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, new_sequence

PROMPTS = [prompt_of(length) for length in (1, 16, 70, 41)]
BOTH = pytest.mark.parametrize("apart", [False, True], ids=["one card", "two cards"])


def devices(apart: bool, size: int = 2) -> list[int]:
    """The card of each process; the test is skipped where there are too few."""
    if apart and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    return list(range(size)) if apart else [0] * size


def cards_of(size: int = 2) -> list[int]:
    """A card for each process if there are as many, or one for all."""
    return devices(torch.cuda.device_count() >= size, size)


def model_of(name: str, folder: Path, layers: int = 0) -> tuple[Path, int | None]:
    """A family's checkpoint, with so many layers if they are given, and the longest sequence that is tried."""
    case = next(case for case in CASES if case.name == name)
    if layers:
        fields = {key: value for key, value in case.fields.items() if key != "layer_types"}
        case = replace(case, fields=fields | {"num_hidden_layers": layers})
    return case.build(folder), case.max_model_len


def config(name: str, folder: Path, layers: int = 0, **settings: object) -> EngineConfig:
    """Small sizes for a family's checkpoint."""
    model, longest = model_of(name, folder, layers)
    sizes = {"num_blocks": 200, "max_sequences": 8, "max_batch_tokens": 128, "max_model_len": longest}
    return EngineConfig.of(model=model, device="cuda", **sizes | settings)


def generated(engine: Engine) -> list[list[int]]:
    """Tokens behind prompts in chunks, decoded from graphs, greedy and drawn, again behind cached blocks."""
    generator = Generator(engine, chunk_size=23)
    sequences = [new_sequence(str(number), prompt) for number, prompt in enumerate(PROMPTS)]
    sequences.append(new_sequence("drawn", PROMPTS[1], temperature=1.0, seed=5, frequency_penalty=0.3))
    return [*generator.run(sequences), *generator.run([new_sequence("again", PROMPTS[2])])]
