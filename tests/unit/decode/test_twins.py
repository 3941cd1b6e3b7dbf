"""Choices of one prompt: its first computes it, and the others find all of its full blocks."""

from __future__ import annotations

import pytest

from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from tests.unit.decode.scheduling import BLOCK, land, make_request, new_scheduler
from worker.serving.twins import LEAST_SHARED

PROMPT = LEAST_SHARED + 3 * BLOCK + 1


def _asked(scheduler: DecodeScheduler, count: int, *, prompt: int = PROMPT, priority: int = 0) -> list[DecodeRequest]:
    requests = [make_request(f"r{at}", prompt=prompt, max_tokens=3, priority=priority) for at in range(count)]
    for request in requests:
        scheduler.enqueue(request)
    return requests


def _computed(scheduler: DecodeScheduler, pool: BlockPool, *, budget: int = 4096) -> int:
    """Prompt tokens that passes compute until all is over."""
    count = 0
    for _ in range(100):
        chunks = scheduler.plan(budget)
        count += sum(chunk.num_tokens for chunk in chunks if chunk.start < chunk.sequence.num_prompt_tokens)
        land(scheduler, pool, chunks)
        if not len(scheduler):
            return count
    pytest.fail("it never ended")


@pytest.mark.parametrize("budget", [100, 4096])
@pytest.mark.parametrize("state_blocks", [0, 2])
def test_a_prompt_is_computed_once_for_all_of_its_choices(budget: int, state_blocks: int) -> None:
    scheduler, pool = new_scheduler(num_blocks=4000, state_blocks=state_blocks)
    requests = _asked(scheduler, 4)
    tail = PROMPT - (PROMPT - 1) // BLOCK * BLOCK
    assert _computed(scheduler, pool, budget=budget) == PROMPT + 3 * tail
    assert [request.sequence.num_found for request in requests] == [0, *3 * [PROMPT - tail]]
    assert pool.num_used == 0


def test_short_prompts_begin_together() -> None:
    scheduler, _ = new_scheduler(num_blocks=4000)
    _asked(scheduler, 4, prompt=LEAST_SHARED - BLOCK)
    assert len(scheduler.plan(4096)) == 4


def test_others_pass_who_waits_and_the_next_goes_on_where_the_first_left() -> None:
    scheduler, pool = new_scheduler(num_blocks=4000)
    first, second = _asked(scheduler, 2)
    other = make_request("other", prompt=40, max_tokens=3, salt=50)
    scheduler.enqueue(other)
    chunks = scheduler.plan(100)
    assert [chunk.sequence for chunk in chunks] == [first.sequence]
    land(scheduler, pool, chunks)
    chunks = scheduler.plan(4096)
    assert [chunk.sequence for chunk in chunks] == [first.sequence, other.sequence]
    for chunk in chunks:
        scheduler.landed(chunk)
    scheduler.remove(first)  # its client left, and nothing of the pass is known
    (chunk, *_) = [chunk for chunk in scheduler.plan(4096) if chunk.sequence is second.sequence]
    assert chunk.start == 100


def test_the_more_important_does_not_wait() -> None:
    scheduler, pool = new_scheduler(num_blocks=4000)
    _asked(scheduler, 1)
    chunks = scheduler.plan(100)
    land(scheduler, pool, chunks)
    (urgent,) = _asked(scheduler, 1, priority=5)
    assert urgent.sequence in [chunk.sequence for chunk in scheduler.plan(4096)]
