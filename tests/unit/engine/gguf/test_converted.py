"""A file as llama.cpp's converter writes it answers as its folder does, which other tests compare with `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.unit.engine.families.exact import prompt_of
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.gguf.cases import CASES
from tests.unit.engine.gguf.converted import recorded, write_converted

PROMPT = prompt_of(40)
TOLERANCE = 1e-4  # of a logprob


def answer(model: Path) -> tuple[list[int], list[float]]:
    """Eight tokens, and the logprobs of the likeliest twenty of each."""
    engine = Engine(EngineConfig(model=model, num_blocks=64, dtype="float32"))
    generator = Generator(engine, chunk_size=23)
    (tokens,) = generator.run([new_sequence("one", PROMPT, max_tokens=8, logprobs=20)])
    found = [sampled.logprobs for sampled in generator.results["one"] if sampled is not None]
    return tokens, [value for each in found if each is not None for value in each.top_logprobs]


@pytest.mark.parametrize("name", recorded())
def test_it_answers_as_its_folder(name: str, tmp_path: Path) -> None:
    folder = CASES[name].build(tmp_path / "model")
    file = write_converted(folder, tmp_path / "model.gguf", name)
    tokens, logprobs = answer(file)
    expected, theirs = answer(folder)
    assert tokens == expected
    assert len(logprobs) == len(theirs) == 8 * 20
    assert max(abs(one - other) for one, other in zip(logprobs, theirs, strict=True)) < TOLERANCE
