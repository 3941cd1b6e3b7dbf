"""The continuous batch under random arrivals, lengths and pool sizes: nobody starves, no block is lost or shared by mistake."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Job, SamplingParams
from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.block_pool import BlockPool
from engine.sequence import Sequence
from worker.prefix import blocks_for, publish_computed

BLOCK = 4


def make_request(name: str, *, prompt: int, max_tokens: int, priority: int = 0, salt: int = 0) -> DecodeRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    job = Job(
        request_id=name,
        attempt=1,
        gateway="gw",
        token_ids=b"",
        num_prompt_tokens=prompt,
        hash_root=bytes(16),
        sampling=sampling,
        decode_workers=[],
        deadline_ms=60_000,
        priority=priority,
    )
    sequence = Sequence(
        request_id=name,
        attempt=1,
        token_ids=[(salt + index) % 97 for index in range(prompt)],
        num_prompt_tokens=prompt,
        sampling=sampling,
        hash_root=bytes(16),
    )
    return DecodeRequest(job=job, sequence=sequence, deadline_at=float("inf"), first_position=0)


def run_step(scheduler: DecodeScheduler, pool: BlockPool, budget: int) -> list[DecodeRequest]:
    """One pass as the role does it; returns the requests that finished in it."""
    by_sequence = {id(request.sequence): request for request in scheduler}
    finished = []
    chunks = scheduler.plan(budget)
    assert sum(chunk.num_tokens for chunk in chunks) <= budget
    for chunk in chunks:
        sequence = chunk.sequence
        assert len(sequence.block_table) * BLOCK >= sequence.num_computed + chunk.num_tokens
        sequence.num_computed += chunk.num_tokens
        publish_computed(pool, sequence)
        assert chunk.sample == (sequence.num_computed == len(sequence.token_ids))
        if chunk.sample:
            sequence.append(7)
            if sequence.finish_reason():
                scheduler.remove(by_sequence[id(sequence)])
                finished.append(by_sequence[id(sequence)])
    return finished


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 40),
    budget=st.integers(8, 32),
    max_sequences=st.integers(1, 8),
)
def test_every_request_finishes_and_every_block_comes_back(
    seed: int, num_blocks: int, budget: int, max_sequences: int
) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK)
    scheduler = DecodeScheduler(pool=pool, max_sequences=max_sequences)
    limit = num_blocks * BLOCK
    pending = []
    for index in range(12):
        prompt = rng.randint(1, limit // 2)
        pending.append(
            make_request(
                f"r{index}",
                prompt=prompt,
                max_tokens=rng.randint(1, limit - prompt),
                priority=rng.randint(0, 2),
                salt=rng.randint(0, 2),
            )
        )
    expected = len(pending)
    finished: list[DecodeRequest] = []
    for _ in range(20_000):
        if pending and rng.random() < 0.3:
            scheduler.enqueue(pending.pop())
        finished += run_step(scheduler, pool, budget)
        assert len(scheduler.running) <= max_sequences
        if len(finished) == expected:
            break
    assert len(finished) == expected
    assert pool.num_free == num_blocks
    assert all(request.sequence.num_generated == request.sequence.sampling.max_tokens for request in finished)


def test_a_decoding_sequence_gets_its_token_before_a_long_prompt_gets_the_budget() -> None:
    pool = BlockPool(num_blocks=64, block_size=BLOCK)
    scheduler = DecodeScheduler(pool=pool, max_sequences=8)
    short = make_request("short", prompt=3, max_tokens=10)
    scheduler.enqueue(short)
    run_step(scheduler, pool, 8)
    scheduler.enqueue(make_request("long", prompt=100, max_tokens=10, salt=5))
    chunks = scheduler.plan(8)
    assert [(chunk.sequence.request_id, chunk.num_tokens) for chunk in chunks] == [("short", 1), ("long", 7)]


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    pool = BlockPool(num_blocks=6, block_size=BLOCK)
    scheduler = DecodeScheduler(pool=pool, max_sequences=8)
    requests = [
        make_request("important", prompt=7, max_tokens=9, priority=1),
        make_request("old", prompt=7, max_tokens=9, salt=20),
    ]
    for request in requests:
        scheduler.enqueue(request)
    while scheduler.preemptions == 0:
        run_step(scheduler, pool, 16)
    assert [request.id for request in scheduler.waiting] == ["old"]
    assert requests[1].sequence.num_computed == 0


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, BLOCK) == blocks
