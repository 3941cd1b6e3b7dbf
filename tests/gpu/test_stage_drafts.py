"""Drafters in the first of several stages on GPUs: drafts, acceptance and texts are those of one process.

    python -m pytest -q tests/gpu/test_stage_drafts.py

On one card the processes take turns, as in `test_stages`.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.ranks.leading import leading
from engine.config import EngineConfig
from engine.engine import Engine
from engine.parallel.group import RankLostError
from tests.e2e.wide import check
from tests.gpu.several import BOTH, cards_of, devices
from tests.models import build_tiny_model
from tests.unit.engine.drafters import drafter
from tests.unit.engine.drafts import new_sequences
from tests.unit.engine.generate import Generator
from tests.unit.engine.rank_drafts import config_of, drafted, streamed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("freed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# One of each form; DeepSeek's layer has latents, Qwen3-Next has states beside keys and values.
DRAFTERS = [
    ("eagle3", 7),
    ("eagle3+parallel", 7),
    ("dflash", 7),
    ("draft_model", 7),
    ("mimo", 4),
    ("deepseek_v3", 5),
    ("qwen3_next", 8),
]


def _config(name: str, folder: Path, layers: int) -> EngineConfig:
    sizes = {"device": "cuda", "dtype": "float32", "max_sequences": 12, "max_batch_tokens": 256}
    return replace(config_of(name, folder, layers=layers), **sizes)  # type: ignore[arg-type]


def _said(engine: Engine) -> list[object]:
    """Answers, drafts and acceptance: a pass at a time, then with as many in flight as there may be stages, also drawn."""
    return [drafted(engine), streamed(engine, count=3), streamed(engine, count=2, temperature=0.7, seed=3)]


@BOTH
@pytest.mark.parametrize(("name", "layers"), DRAFTERS)
def test_the_first_stage_drafts_what_one_process_does(name: str, layers: int, apart: bool, tmp_path: Path) -> None:
    cards, alone = devices(apart), _config(name, tmp_path, layers)
    wanted = _said(Engine(alone))
    with leading(cards, are_stages=True) as ranks:
        engine = Engine(alone, ranks=ranks)
        assert engine.draft_ms
        assert _said(engine) == wanted


@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
def test_the_first_of_three_stages_drafts(name: str, tmp_path: Path) -> None:
    alone = _config(name, tmp_path, 7)
    wanted = _said(Engine(alone))
    with leading(cards_of(3), are_stages=True) as ranks:
        assert _said(Engine(alone, ranks=ranks)) == wanted


@pytest.mark.parametrize(("name", "layers"), [("eagle3", 7), ("dflash", 7), ("draft_model", 7), ("mimo", 4)])
def test_ranks_of_the_first_stage_draft_together(name: str, layers: int, tmp_path: Path) -> None:
    alone = _config(name, tmp_path, layers)
    wanted = _said(Engine(alone))
    with leading(cards_of(4), are_stages=True, width=2) as ranks:
        assert _said(Engine(replace(alone, tensor_parallel_size=2), ranks=ranks)) == wanted


def test_a_stage_that_ends_while_the_first_one_drafts_is_named(tmp_path: Path) -> None:
    alone = _config("eagle3", tmp_path, 7)
    with leading(cards_of(), are_stages=True) as ranks:
        engine = Engine(alone, ranks=ranks)
        generator, sequences = Generator(engine), new_sequences()
        for sequence in sequences:
            generator.start(sequence)
        os.kill(int(ranks.followers.pids[0]), signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(RankLostError, match="rank 1"):
            generator.go_on(sequences)
        assert "rank 1" in engine.lost
        torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
async def test_what_drafters_keep_is_handed_over(name: str, prefill: int, decode: int, tmp_path: Path) -> None:
    model, folder = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=7), tmp_path / "draft"
    drafter(name, model, folder)
    told = {"method": name, "model": str(folder), "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    options = {"device": "cuda:0", "transport": "cuda_ipc", "dtype": "float32", "speculative_config": json.dumps(told)}
    await check(tmp_path, prefill=prefill, decode=decode, model=model, are_stages=(True, True), **options)
