"""Suspects of having killed a worker: one at a time in the device's hands, each in its turn, named before it is launched."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import pytest
from msgspec import UNSET

from common.messages import SamplingParams
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk
from engine.sequence import Sequence
from prefill.scheduler import next_chunks
from tests.fakes.device import HandEngine, OneTokenEach, running
from tests.unit.decode.scheduling import land, make_request
from tests.unit.prefill.scheduling import waiting
from worker.device.pipeline import Pipeline
from worker.device.prompt_budget import PromptBudget
from worker.device.trials import Trials

SUSPECTS, OTHERS, UNTIL = 5, 3, 3


def suspects_of(chunks: list[Chunk]) -> list[str]:
    return [chunk.sequence.request_id for chunk in chunks if chunk.sequence.is_suspect]


@pytest.mark.parametrize("depth", [1, 2], ids=["one pass at a time", "passes overlap"])
def test_suspects_take_turns_beside_the_others_until_all_are_cleared(depth: int) -> None:
    pool, trials = BlockPool(num_blocks=64, block_size=4), Trials()
    scheduler = DecodeScheduler(pool=pool, max_sequences=8, max_model_len=256, trials=trials)
    for number in range(SUSPECTS + OTHERS):
        request = make_request(f"r{number}", prompt=3, max_tokens=30, salt=10 * number)
        request.sequence.suspect_until = UNTIL if number < SUSPECTS else 0
        trials.watch(request.sequence, f"gateway-{number % 2}")
        scheduler.enqueue(request)
    assert trials.gateways == {"gateway-0", "gateway-1"}
    flying: deque[list[Chunk]] = deque()
    turns: list[str] = []
    for _ in range(100):
        chunks = scheduler.plan(64)
        trials.planned(chunks)
        flying.append(chunks)
        tried = [name for passed in flying for name in suspects_of(passed)]
        assert len(tried) <= 1
        turns += suspects_of(chunks)
        if len(flying) == depth:
            landed = flying.popleft()
            trials.landed(landed)
            land(scheduler, pool, landed)
        if trials.is_idle:
            break
    assert trials.is_idle
    counts = Counter(turns)
    assert set(counts.values()) == {UNTIL}
    assert len(counts) == SUSPECTS


def test_prompts_that_may_have_killed_a_worker_are_computed_one_after_the_other() -> None:
    trials, requests = Trials(), waiting(10, 20, 30)
    for request in requests[:2]:
        request.sequence.suspect_until = 1
        trials.watch(request.sequence, "gateway", f"trace of {request.id}")
    assert [trials.context(request.sequence) for request in requests] == ["trace of r0", "trace of r1", UNSET]
    first = next_chunks(requests, 512, trials=trials)
    trials.planned(first)
    assert [chunk.num_tokens for chunk in first] == [10, 30]
    assert next_chunks(requests, 512, trials=trials) == []
    trials.landed(first)
    requests[0].first_token = 7
    assert [chunk.num_tokens for chunk in next_chunks(requests, 512, trials=trials)] == [20]


async def test_a_suspect_s_pass_is_launched_when_it_was_named_and_not_before() -> None:
    named: list[str] = []
    heard = asyncio.Event()

    async def announce(suspect: Sequence) -> None:
        named.append(suspect.request_id)
        await heard.wait()

    engine, planner, trials = HandEngine(), OneTokenEach("a", passes=1), Trials()
    pipeline = Pipeline(engine=engine, budget=PromptBudget(token_budget=8), trials=trials, announce=announce)
    [sequence] = planner.sequences
    sequence.suspect_until = 1_000
    trials.watch(sequence, "gateway")
    pipeline.attach(planner)
    async with running(pipeline, engine):
        while not named:
            await asyncio.sleep(0)
        assert named == ["a"]
        assert engine.passes == []
        heard.set()
        await engine.launched(1)


def test_nobody_is_looked_for_where_nobody_is_suspected() -> None:
    trials = Trials()
    sequence = Sequence(
        request_id="r",
        attempt=1,
        token_ids=[1],
        num_prompt_tokens=1,
        sampling=SamplingParams(max_tokens=1),
        hash_root=b"",
    )
    trials.watch(sequence, "gateway")
    assert trials.is_idle
    assert trials.held_back([sequence]) == set()
