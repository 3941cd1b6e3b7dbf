"""Ranks on GPUs answer as one does: processes whose kernels write to each other, on one card, or each on its own.

    python -m pytest -q tests/gpu/test_ranks.py

On one card the processes take turns by the driver's time slices: what is checked is that tokens are right, never how fast.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.ranks.leading import leading
from engine.engine import Engine
from engine.parallel.group import RankLostError
from tests.gpu.several import BOTH, PROMPTS, devices, generated
from tests.gpu.several import config as config_of_family
from tests.unit.engine.generate import Generator, new_sequence, said_in_flight
from tests.unit.engine.rank_drafts import SHORT, config_of, drafted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("freed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = ("llama", "gpt_oss", "deepseek_v3", "qwen3_next")


@BOTH
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_generate_what_one_does(name: str, apart: bool, tmp_path: Path) -> None:
    cards, config = devices(apart), config_of_family(name, tmp_path, dtype="float32")
    wanted = generated(Engine(config))
    with leading(cards) as ranks:
        assert generated(Engine(replace(config, tensor_parallel_size=2), ranks=ranks)) == wanted


def test_four_ranks_generate_what_one_does(tmp_path: Path) -> None:
    config = config_of_family("llama", tmp_path, dtype="float32")
    wanted = generated(Engine(config))
    with leading(devices(torch.cuda.device_count() >= 4, 4)) as ranks:
        assert generated(Engine(replace(config, tensor_parallel_size=4), ranks=ranks)) == wanted


@pytest.mark.parametrize("name", SHORT)
def test_two_ranks_draft_what_one_does(name: str, tmp_path: Path) -> None:
    config = replace(config_of(name, tmp_path), device="cuda", dtype="float32")
    wanted = drafted(Engine(config))
    with leading(devices(torch.cuda.device_count() > 1)) as ranks:
        assert drafted(Engine(replace(config, tensor_parallel_size=2), ranks=ranks)) == wanted


def test_passes_overlap_and_ranks_agree_in_16_bits(tmp_path: Path) -> None:
    """A second engine of ranks says the same, with two passes in flight all along."""
    config = replace(config_of_family("llama", tmp_path, dtype="bfloat16"), tensor_parallel_size=2)
    answers = []
    for _ in range(2):
        with leading(devices(torch.cuda.device_count() > 1)) as ranks:
            answers.append(said_in_flight(Engine(config, ranks=ranks), PROMPTS[2]))
    assert answers[0] == answers[1]


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    config = replace(config_of_family("llama", tmp_path, dtype="bfloat16"), tensor_parallel_size=2)
    with leading(devices(torch.cuda.device_count() > 1)) as ranks:
        engine = Engine(config, ranks=ranks)
        generator, sequence = Generator(engine), new_sequence("a", PROMPTS[2], max_tokens=200)
        generator.start(sequence)
        ranks.followers._followers[0].process.kill()  # type: ignore[attr-defined]
        with pytest.raises((RankLostError, RuntimeError), match=r"rank 1|CUDA"):  # the device may say it first
            generator.go_on([sequence])
        assert "rank 1" in engine.lost
