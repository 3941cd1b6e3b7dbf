"""Sequences that a measurement lays into an engine's pool itself, without scheduler and block pool."""

from __future__ import annotations

import msgspec

from common.messages import PromptLogprobs, SamplingParams
from engine.cache.block_pool import BlockPool
from engine.engine import Engine
from engine.sequence import Sequence
from engine.step.warm import tables_from

MOST_STEPS = 24  # for which a sequence has blocks beside its prompt
GREEDY = SamplingParams(temperature=0.0, max_tokens=100_000)


def made_up(engine: Engine, length: int, index: int = 0) -> list[int]:
    """Token ids of a prompt that says nothing; another `index`, another prompt."""
    return [(7 * position + index) % engine.vocab_size for position in range(length)]


def new_sequence(
    engine: Engine, token_ids: list[int], *, index: int = 0, sampling: SamplingParams = GREEDY, steps: int = MOST_STEPS
) -> Sequence:
    """The `index`-th of sequences with as many tokens, in blocks of its own."""
    blocks = -(-(len(token_ids) + steps) // engine.layout.block_size)
    first = index * blocks * BlockPool.of(engine.layout).growth
    return Sequence(
        request_id=f"r{index}",
        attempt=1,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=sampling,
        hash_root=b"",
        tables=tables_from(engine.layout, first, blocks, number=index),
    )


def step(engine: Engine, sequences: list[Sequence]) -> None:
    """One pass with all tokens that the engine has not seen, and one more token of each."""
    chunks = [sequence.schedule(sequence.num_unscheduled) for sequence in sequences]
    for chunk, sampled in zip(chunks, engine.launch(chunks).wait(), strict=True):
        chunk.sequence.finish(chunk)
        assert sampled is not None
        chunk.sequence.append(sampled.token_id)


def scored(engine: Engine, token_ids: list[int]) -> PromptLogprobs:
    """The logprobs and ranks of all tokens but the first, in one pass."""
    sequence = new_sequence(engine, token_ids)
    chunk = msgspec.structs.replace(sequence.schedule(sequence.num_unscheduled), scored=len(token_ids) - 1)
    (sampled,) = engine.launch([chunk]).wait()
    assert sampled is not None
    assert sampled.prompt_logprobs is not None
    return sampled.prompt_logprobs
