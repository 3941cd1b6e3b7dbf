# mypy: allow-untyped-calls, disable-error-code="no-any-return, operator"
"""Greedy decoding gives, token for token, what transformers gives in float32, however the work is cut up."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from engine.engine import Engine
from tests.models import FAMILIES, VOCAB_SIZE
from tests.unit.engine.generate import Generator, new_sequence

PROMPT_LENGTHS = (1, 15, 16, 17, 70)  # around a block, and longer than Mistral's window of 24
NUM_TOKENS = 12


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed + length)).tolist()


@cache
def reference_model(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference(folder: Path, prompt: list[int]) -> list[int]:
    """transformers' greedy continuation, never ended by a stop token."""
    inputs = torch.tensor([prompt])
    output = reference_model(folder).generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(family: str, tiny_engine: Callable[[str], Engine]) -> Engine:
    return tiny_engine(family)


@pytest.fixture
def expected(family: str, tiny_model: Callable[[str], Path]) -> Callable[[list[int]], list[int]]:
    return lambda prompt: reference(tiny_model(family), prompt)


@pytest.mark.quick
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_a_prompt_alone(engine: Engine, expected: Callable[[list[int]], list[int]], length: int) -> None:
    prompt = prompt_of(length)
    assert Generator(engine).run([new_sequence("a", prompt)]) == [expected(prompt)]


@pytest.mark.parametrize("chunk_size", [16, 7])
def test_a_prompt_in_chunks(engine: Engine, expected: Callable[[list[int]], list[int]], chunk_size: int) -> None:
    prompt = prompt_of(70)
    assert Generator(engine, chunk_size=chunk_size).run([new_sequence("a", prompt)]) == [expected(prompt)]


def test_a_prompt_whose_prefix_is_cached(engine: Engine, expected: Callable[[list[int]], list[int]]) -> None:
    prompt = prompt_of(70)
    other_ending = prompt[:40] + prompt_of(9, seed=5)
    generator = Generator(engine)
    generator.run([new_sequence("first", prompt)])
    again, branched = new_sequence("again", prompt), new_sequence("branched", other_ending)

    assert generator.run([again, branched]) == [expected(prompt), expected(other_ending)]
    assert (again.num_cached, branched.num_cached) == (64, 32)


@pytest.mark.quick
@pytest.mark.parametrize("chunk_size", [512, 13])
def test_sixteen_prompts_in_one_batch(
    engine: Engine, expected: Callable[[list[int]], list[int]], chunk_size: int
) -> None:
    prompts = [prompt_of(PROMPT_LENGTHS[index % 5], seed=index % 7) for index in range(16)]
    sequences = [new_sequence(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    assert Generator(engine, chunk_size=chunk_size).run(sequences) == [expected(prompt) for prompt in prompts]


def test_the_window_is_shorter_than_the_context(tiny_engine: Callable[[str], Engine]) -> None:
    """Tokens that no position of any layer can see any more do not matter; one inside the window does."""
    recent = prompt_of(60)
    far, near = [7, *recent], [8, *recent]
    run = Generator(tiny_engine("mistral")).run
    # Two layers of window 24 see 46 positions back from the last.
    assert run([new_sequence("far", far)]) == run([new_sequence("near", near)])
    assert run([new_sequence("a", recent)]) != run([new_sequence("b", [*recent[:50], 9, *recent[51:]])])
