"""What a GPU chooses: kernels against their twins, answers inside grammars with two passes in flight, scores of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.messages import Grammar
from engine.config import CacheConfig, EngineConfig
from engine.engine import Chunk, Engine, Pass
from engine.sequence import Sequence
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.kernels.sampling_checks import CHECKS, run

DEVICE = "cuda"
DEMO = Path(__file__).resolve().parents[2] / "demo"
ROWS, STEPS = 24, 60
ITEM = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
ENDLESS = Grammar(text=f"start: %json {json.dumps({'type': 'array', 'items': ITEM, 'minItems': 1000})}")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        EngineConfig(model=DEMO, device=DEVICE, dtype="float16", max_sequences=32, cache=CacheConfig(num_blocks=600))
    )


@pytest.mark.parametrize("name", CHECKS)
def test_sampling_kernel(name: str) -> None:
    run(name, DEVICE, large=True)


def answers(engine: Engine, *, in_flight: int) -> list[list[int]]:
    """Every third row is free, others have penalties, filters and logprobs: what masks must work with."""
    generator, sequences = Generator(engine), list[Sequence]()
    for row in range(ROWS):
        more = [{}, {"top_p": 0.9, "frequency_penalty": 0.3}, {"top_k": 40, "logprobs": 3, "repetition_penalty": 1.1}]
        options = {"temperature": 0.9, "seed": row, "max_tokens": STEPS + 9, "stop_token_ids": [2]} | more[row // 3 % 3]
        sequences.append(new_sequence(f"{in_flight}-{row}", [5 + row, 9, 11], **options))
        if row % 3:
            sequences[-1].grammar = ENDLESS
            engine.grammars.prepare(sequences[-1]).result()
        generator.admit(sequences[-1])
    launched: list[tuple[list[Chunk], Pass]] = []
    for step in range(STEPS):
        chunks = [sequence.schedule(sequence.num_unscheduled if step == 0 else 1) for sequence in sequences]
        launched.append((chunks, engine.launch(chunks)))
        if len(launched) == in_flight:
            generator.deliver(*launched.pop(0))
    for chunks, pass_ in launched:
        generator.deliver(chunks, pass_)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def test_two_passes_in_flight_stay_inside_their_grammars(engine: Engine) -> None:
    found = answers(engine, in_flight=2)
    assert found == answers(engine, in_flight=1)
    tokenizer = engine.grammars._tokenizer
    for row, tokens in enumerate(found):
        grammar = new_sequence("check", [1])
        grammar.token_ids, grammar.grammar = [1, *tokens], ENDLESS if row % 3 else None
        assert len(tokens) == STEPS
        if grammar.grammar is not None and tokenizer is not None:
            assert not engine.grammars.masks([grammar.schedule(len(tokens) + 1)], lambda _: 0).problems


def test_scores_of_a_prompt_are_the_cpu_s(engine: Engine) -> None:
    host = Engine(EngineConfig(model=DEMO, dtype="float32", num_threads=1, cache=CacheConfig(num_blocks=64)))
    prompt = [(7 * at + at * at) % 900 + 20 for at in range(150)]
    found = []
    for one in (engine, host):
        sequence, generator = new_sequence("scored", prompt, prompt_logprobs=3, max_tokens=1), Generator(one)
        generator.admit(sequence)
        while not sequence.finish_reason():
            chunks = [sequence.schedule(sequence.num_next)]
            pass_ = generator.launch(chunks)
            (result,) = pass_.wait()
            if result is not None and result.prompt_logprobs is not None:
                sequence.scored(chunks[0], result.prompt_logprobs)
            generator.deliver(chunks, pass_)
        assert sequence.prompt_logprobs is not None
        found.append(sequence.prompt_logprobs)
    for name, count in (("logprobs", 149), ("top_logprobs", 3 * 149)):
        here, there = (np.frombuffer(getattr(one, name), "<f4") for one in found)
        assert len(here) == count
        assert here == pytest.approx(there, abs=0.1)
