"""Drafters on a GPU: their drafts are the plain arithmetic's, behind graphs, prompts in chunks and tokens in flight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from tests.models import build_tiny_model
from tests.unit.engine.drafters import drafter
from tests.unit.engine.drafts import PROMPTS, Drafts, compare_drafts, new_sequences
from tests.unit.engine.generate import Generator, new_sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DRAFTERS = (
    "eagle3",
    "eagle3+parallel",
    "eagle3+parallel+two_layers",
    "dflash",
    "dflash+window",
    "dspark+anchor",
    "draft_model",
    "none",
)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_on_a_gpu_are_those_of_the_arithmetic(name: str, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "target", "llama", num_hidden_layers=3)
    settings, reference = drafter(name, model, tmp_path / "draft")
    shared = {"model": model, "dtype": "float32", "max_sequences": 8, "cache": CacheConfig(num_blocks=300)}
    engine, on_cpu = Engine(EngineConfig(device="cuda", **shared, **settings)), Engine(EngineConfig(**shared))
    plain, sequences = Generator(engine, chunk_size=16), new_sequences()
    answers = plain.run(sequences)
    assert answers == Generator(on_cpu).run(new_sequences())
    if reference is None:
        return
    assert compare_drafts(plain, sequences, reference) > 35
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    verifying, sequences = Generator(engine, chunk_size=32, draft=Drafts(known, wrong=0.3)), new_sequences()
    assert verifying.run(sequences) == answers
    assert compare_drafts(verifying, sequences, reference) > 10
    generator, sequence = Generator(engine), new_sequence("a", PROMPTS[0])
    generator.start(sequence)
    chunks = [sequence.schedule(1)]
    passes = [generator.launch(chunks[:1])]
    chunks.append(sequence.schedule(1))  # its token is in flight
    passes.append(generator.launch(chunks[1:]))
    for chunk, launched in zip(chunks, passes, strict=True):
        generator.deliver([chunk], launched)
    generator.go_on([sequence])
    assert compare_drafts(generator, [sequence], reference) > 8
