"""Sequences with windows, and states, share a small pool: a prompt that has blocks waits for nobody, and nothing is lost."""

from __future__ import annotations

import random
from collections import deque

import pytest

from decode.request import DecodeRequest
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk
from engine.groups import MARGIN
from engine.step.limits import wrong_tables
from tests.unit.decode.scheduling import BLOCK, land, make_request, new_scheduler
from worker.serving.allocation import longest_sequence

NUM_REQUESTS = 10


def small_pool(dice: random.Random) -> dict[str, int]:
    """Room for few more entries than a window's."""
    window_blocks, window, state_blocks = dice.randint(1, 4), dice.randint(2, 40), dice.choice([0, 0, 1, 2])
    seen = -(-(window - 1) // BLOCK)
    more = MARGIN + dice.choice([0, 0, 1, 3, 20])
    num_blocks = dice.randint(6, 40) + window_blocks * (seen + more) + state_blocks
    beside = {"window_blocks": window_blocks, "window": window, "state_blocks": state_blocks}
    return {"num_blocks": num_blocks, **beside}


def drawn_request(dice: random.Random, name: str, longest: int) -> DecodeRequest:
    prompt = dice.randint(1, longest - 2)
    max_tokens = dice.randint(1, longest - prompt - 1)
    priority, salt = dice.choice([0, 0, 1]), dice.choice([0, 0, 50])
    return make_request(name, prompt=prompt, max_tokens=max_tokens, priority=priority, salt=salt)


def is_covered(pool: BlockPool, chunk: Chunk) -> bool:
    return not wrong_tables(chunk, pool.groups)


@pytest.mark.quick(first=20)
@pytest.mark.parametrize("seed", range(60))
def test_whoever_gives_way_each_sequence_is_computed_to_its_end(seed: int) -> None:
    dice = random.Random(seed)
    scheduler, pool = new_scheduler(max_sequences=dice.choice([2, 3, 5]), **small_pool(dice))
    requests = [drawn_request(dice, str(number), longest_sequence(pool)) for number in range(NUM_REQUESTS)]
    depth, budget = dice.choice([1, 2]), dice.choice([1, 7, 16, 40])
    coming, in_flight = deque(requests), deque[list[Chunk]]()
    while coming or len(scheduler) or in_flight:
        if coming and dice.random() < 0.3:
            scheduler.enqueue(coming.popleft())
        chunks = scheduler.plan(budget) if len(in_flight) < depth else []
        assert all(chunk.num_tokens and is_covered(pool, chunk) for chunk in chunks)
        if chunks:
            in_flight.append(chunks)
        elif in_flight:
            land(scheduler, pool, in_flight.popleft())
        else:
            assert not len(scheduler), "they wait for each other"
    assert all(request.sequence.num_generated == request.sequence.sampling.max_tokens for request in requests)
    assert pool.num_used == 0
