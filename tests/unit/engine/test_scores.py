"""Logprobs of a prompt's own tokens, against transformers' forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from common.messages import PromptLogprobs
from engine.engine import Engine
from engine.sequence import MAX_SCORED_TOKENS
from tests.models import FAMILIES
from tests.unit.engine.generate import Generator, new_sequence, scored

PROMPTS = [
    [(7 * position + start) % 500 for position in range(length)] for start, length in ((3, 150), (11, 2), (5, 1))
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def reference(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_size", [512, 33, 1])
def test_scores_are_the_model_s_own(
    tiny_engine: Callable[[str], Engine], tiny_model: Callable[[str], Path], family: str, chunk_size: int
) -> None:
    prompts = PROMPTS if chunk_size > 1 else [PROMPTS[0][:9], *PROMPTS[1:]]
    sequences = [new_sequence(str(index), prompt, prompt_logprobs=3) for index, prompt in enumerate(prompts)]
    sequences.append(new_sequence("plain", [9, 8, 7, 6]))
    scored(tiny_engine(family), sequences, chunk_size=chunk_size)
    assert sequences[-1].prompt_logprobs is None
    for prompt, sequence in zip(prompts, sequences, strict=False):
        with torch.inference_mode():
            logprobs = reference(tiny_model(family))(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)
        chosen = logprobs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.int64)]
        found = sequence.prompt_logprobs
        if found is None:
            assert len(prompt) == 1
            continue
        assert np.frombuffer(found.logprobs, "<f4") == pytest.approx(chosen.numpy(), abs=1e-4)
        top = torch.from_numpy(np.frombuffer(found.top_ids, "<u4").astype(np.int64)).view(-1, 3)
        assert logprobs.gather(1, top).numpy() == pytest.approx(logprobs.topk(3).values.numpy(), abs=1e-4)
        assert np.frombuffer(found.top_logprobs, "<f4").reshape(-1, 3) == pytest.approx(
            logprobs.topk(3).values.numpy(), abs=1e-4
        )
        ranks = np.frombuffer(found.ranks, "<u4")
        assert ((logprobs > chosen[:, None] + 1e-3).sum(-1).numpy() < ranks).all()
        assert (ranks <= (logprobs > chosen[:, None] - 1e-3).sum(-1).numpy()).all()


def test_the_answer_is_the_same_with_scores_and_without(tiny_engine: Callable[[str], Engine]) -> None:
    engine = tiny_engine("llama")
    plain = Generator(engine).run([new_sequence(str(index), prompt) for index, prompt in enumerate(PROMPTS)])
    with_scores = [new_sequence(str(index), prompt, prompt_logprobs=0) for index, prompt in enumerate(PROMPTS)]
    assert scored(engine, with_scores) == plain


def test_a_scored_prompt_is_computed_in_small_chunks_and_never_from_the_cache() -> None:
    sequence = new_sequence("r", list(range(MAX_SCORED_TOKENS + 2)), prompt_logprobs=0)
    first = sequence.schedule(sequence.num_next)
    assert (first.num_tokens, first.scored, first.sample) == (MAX_SCORED_TOKENS, MAX_SCORED_TOKENS, False)
    last = sequence.schedule(sequence.num_next)
    assert (last.num_tokens, last.scored, last.sample) == (2, 1, True)
    sequence.append(5)
    assert not sequence.scores_prompt
    assert sequence.schedule(sequence.num_next).scored == 0


def test_a_prompt_that_is_begun_anew_keeps_each_score_once() -> None:
    sequence = new_sequence("r", list(range(100)), prompt_logprobs=1)
    one = PromptLogprobs(logprobs=bytes(4), ranks=bytes(4), top_ids=bytes(4), top_logprobs=bytes(4))
    many = functools.reduce(PromptLogprobs.then, [one] * MAX_SCORED_TOKENS)
    sequence.scored(sequence.schedule(sequence.num_next), many)
    sequence.restart(0)
    for count in (MAX_SCORED_TOKENS, 99 - MAX_SCORED_TOKENS):
        sequence.scored(sequence.schedule(sequence.num_next), many.first(count))
    assert sequence.prompt_logprobs is not None
    assert sequence.prompt_logprobs.count == 99
    assert len(sequence.prompt_logprobs.top_ids) == 4 * 99
