"""Ranks generate what one does in every format of weights: groups are cut at their borders, or kept whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.rank_forms import NAMES, Written, write
from tests.unit.engine.ranks import engine_of_ranks

# Those with a way of their own; all others are `long`.
FIRST = {"awq": 4, "gptq, order of activations": 2, "fp8, blocks that shares end within": 2, "gguf, gpt-oss": 2}


def _parameter(name: str, size: int) -> object:
    return pytest.param(name, size, id=f"{name}, {size}", marks=[] if FIRST.get(name) == size else [pytest.mark.long])


def _generated(engine: Engine) -> list[list[int]]:
    prompts = [prompt_of(length) for length in (1, 16, 70, 41)]
    sequences = [new_sequence(str(number), prompt) for number, prompt in enumerate(prompts)]
    return Generator(engine, chunk_size=23).run(sequences)


UNEVEN = ("gguf, gpt-oss", "mxfp4")  # 6 experts


@pytest.mark.parametrize(
    ("name", "size"),
    [_parameter(name, size) for name in NAMES for size in (2, 4) if size == 2 or name not in UNEVEN],
)
def test_ranks_generate_what_one_does(name: str, size: int, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    said = _compared(write(name, tiny_model, tmp_path), size)
    assert len({token for tokens in said for token in tokens}) > (1 if "tied" in name else 3)  # which repeat themselves


CUT = ("awq, experts", "gguf, experts", "fp8, experts")


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.long) for name in CUT), "gguf tiles, experts"])
def test_ranks_cut_experts(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    _compared(write(name, tiny_model, tmp_path), 2, enable_expert_parallel=False)


def _compared(stored: Written, size: int, *, enable_expert_parallel: bool = True) -> list[list[int]]:
    """Answers of ranks, which are those of one."""
    config = EngineConfig(
        model=stored.model, dtype=stored.dtype, quantization=stored.quantization, cache=CacheConfig(num_blocks=64)
    )
    ranks = engine_of_ranks(replace(config, enable_expert_parallel=enable_expert_parallel), size)
    said = _generated(ranks)
    assert said == _generated(Engine(config))
    return said
