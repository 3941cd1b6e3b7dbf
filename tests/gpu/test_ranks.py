"""Ranks on GPUs answer as one does: processes whose kernels write to each other, on one card, or each on its own.

    python -m pytest -q tests/gpu/test_ranks.py

On one card the processes take turns by the driver's time slices: what is checked is that tokens are right, never how fast.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.ranks.leading import leading
from engine.config import EngineConfig
from engine.engine import Engine
from engine.parallel.group import RankLostError
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, new_sequence, said_in_flight
from tests.unit.engine.rank_drafts import SHORT, config_of, drafted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ("llama", "gpt_oss", "deepseek_v3", "qwen3_next")
PROMPTS = [prompt_of(length) for length in (1, 16, 70, 41)]


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def _devices(apart: bool, size: int = 2) -> list[int]:
    if apart and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    return list(range(size)) if apart else [0] * size


def _config(name: str, folder: Path, **settings: object) -> EngineConfig:
    case = next(case for case in CASES if case.name == name)
    sizes = {"num_blocks": 200, "max_sequences": 8, "max_batch_tokens": 128, "max_model_len": case.max_model_len}
    return EngineConfig.of(model=case.build(folder), device="cuda", **sizes | settings)


def _generated(engine: Engine) -> list[list[int]]:
    """Tokens behind prompts in chunks, decoded from graphs, greedy and drawn, again behind cached blocks."""
    generator = Generator(engine, chunk_size=23)
    sequences = [new_sequence(str(number), prompt) for number, prompt in enumerate(PROMPTS)]
    sequences.append(new_sequence("drawn", PROMPTS[1], temperature=1.0, seed=5, frequency_penalty=0.3))
    return [*generator.run(sequences), *generator.run([new_sequence("again", PROMPTS[2])])]


@pytest.mark.parametrize("apart", [False, True], ids=["one card", "two cards"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_generate_what_one_does(name: str, apart: bool, tmp_path: Path) -> None:
    config = _config(name, tmp_path, dtype="float32")
    wanted = _generated(Engine(config))
    with leading(_devices(apart)) as ranks:
        assert _generated(Engine(replace(config, tensor_parallel_size=2), ranks=ranks)) == wanted


def test_four_ranks_generate_what_one_does(tmp_path: Path) -> None:
    config = _config("llama", tmp_path, dtype="float32")
    wanted = _generated(Engine(config))
    with leading(_devices(torch.cuda.device_count() >= 4, 4)) as ranks:
        assert _generated(Engine(replace(config, tensor_parallel_size=4), ranks=ranks)) == wanted


@pytest.mark.parametrize("name", SHORT)
def test_two_ranks_draft_what_one_does(name: str, tmp_path: Path) -> None:
    config = replace(config_of(name, tmp_path), device="cuda", dtype="float32")
    wanted = drafted(Engine(config))
    with leading(_devices(torch.cuda.device_count() > 1)) as ranks:
        assert drafted(Engine(replace(config, tensor_parallel_size=2), ranks=ranks)) == wanted


def test_passes_overlap_and_ranks_agree_in_16_bits(tmp_path: Path) -> None:
    """A second engine of ranks says the same, with two passes in flight all along."""
    config = replace(_config("llama", tmp_path, dtype="bfloat16"), tensor_parallel_size=2)
    answers = []
    for _ in range(2):
        with leading(_devices(torch.cuda.device_count() > 1)) as ranks:
            answers.append(said_in_flight(Engine(config, ranks=ranks), PROMPTS[2]))
    assert answers[0] == answers[1]


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    config = replace(_config("llama", tmp_path, dtype="bfloat16"), tensor_parallel_size=2)
    with leading(_devices(torch.cuda.device_count() > 1)) as ranks:
        engine = Engine(config, ranks=ranks)
        generator, sequence = Generator(engine), new_sequence("a", PROMPTS[2], max_tokens=200)
        generator.start(sequence)
        ranks.followers._followers[0].process.kill()  # type: ignore[attr-defined]
        with pytest.raises((RankLostError, RuntimeError), match=r"rank 1|CUDA"):  # the device may say it first
            generator.go_on([sequence])
        assert "rank 1" in engine.lost
