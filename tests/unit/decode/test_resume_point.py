"""A long sequence with states or windows that gives way loses little; the hold for that is small, and in nobody's way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decode.request import DecodeRequest
from decode.resume_point import resume_distance
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from engine.groups import entries_of
from tests.unit.decode.scheduling import BLOCK, land, make_request, new_scheduler
from tests.unit.engine.tables import blocks_of_tokens
from worker.serving.allocation import blocks_for, cargo_of, publish_computed, received

STATE = 2  # blocks of a state: a regular checkpoint each 16 tokens
STATES = {"state_blocks": STATE}
WINDOWS = {"window_blocks": 2, "window": 30}  # a place each 16 tokens
BOTH = STATES | WINDOWS


def hand_over(
    scheduler: DecodeScheduler, pool: BlockPool, name: str, *, prompt: int, max_tokens: int, salt: int
) -> DecodeRequest:
    """A request whose prompt another worker computed: here it has no checkpoint."""
    request = make_request(name, prompt=prompt, max_tokens=max_tokens, salt=salt)
    sequence = request.sequence
    cargo, num_entries = cargo_of(pool, prompt), blocks_for(prompt + 1, BLOCK)
    counts = [
        num_entries - part.first if group.grows else 1 for group, part in zip(pool.groups, cargo.groups, strict=True)
    ]
    entries = [
        entries_of(pool.allocate(count * group.blocks), group.blocks)
        for group, count in zip(pool.groups, counts, strict=True)
    ]
    sequence.tables = received(pool, cargo, entries, [0] * len(entries))
    sequence.restart(prompt)
    publish_computed(pool, sequence)
    sequence.append(7)
    scheduler.join(request)
    return request


def step(scheduler: DecodeScheduler, pool: BlockPool) -> list[DecodeRequest]:
    return land(scheduler, pool, scheduler.plan(64))


def until(condition: Callable[[], object], scheduler: DecodeScheduler, pool: BlockPool) -> None:
    """Steps until the condition holds."""
    for _ in range(500):
        if condition():
            return
        step(scheduler, pool)
    pytest.fail("it never came")


@pytest.mark.parametrize("beside", [STATES, WINDOWS, BOTH])
@pytest.mark.parametrize("prompt", [95, 96, 97, 200])
@pytest.mark.parametrize("max_tokens", [9, 30, 61])
def test_who_gives_way_computes_at_most_one_interval_and_a_block_again(
    prompt: int, max_tokens: int, beside: dict[str, int]
) -> None:
    longest = blocks_for(prompt + 99, BLOCK) * 3
    scheduler, pool = new_scheduler(num_blocks=longest + 100, **beside)
    older = hand_over(scheduler, pool, "older", prompt=20, max_tokens=max_tokens + 8, salt=50)
    long = hand_over(scheduler, pool, "long", prompt=prompt, max_tokens=90, salt=0)
    until(lambda: long.sequence.num_generated >= max_tokens, scheduler, pool)
    others = pool.allocate(pool.num_free)
    reached = 0
    for _ in range(8):
        if not long.preemptions:
            reached = long.sequence.num_computed
            step(scheduler, pool)
    assert older in scheduler.running
    pool.release(others[:40])  # who is admitted has windows for a chunk
    until(lambda: long in scheduler.running, scheduler, pool)
    again = reached - long.sequence.num_cached
    assert again <= resume_distance(pool) + BLOCK
    assert again > 0 or not pool.fixed
    pool.release(others[40:])
    until(lambda: not len(scheduler), scheduler, pool)
    assert long.sequence.num_generated == 90
    assert pool.num_used == 0


@pytest.mark.parametrize("beside", [STATES, WINDOWS, BOTH])
def test_one_alone_holds_nothing(beside: dict[str, int]) -> None:
    scheduler, pool = new_scheduler(num_blocks=300, **beside)
    hand_over(scheduler, pool, "first", prompt=40, max_tokens=50, salt=50)
    second = hand_over(scheduler, pool, "second", prompt=40, max_tokens=9, salt=0)
    until(lambda: second not in scheduler.running, scheduler, pool)
    until(lambda: scheduler.resume_point.blocks or not len(scheduler), scheduler, pool)
    assert pool.num_used == 0


@pytest.mark.parametrize("beside", [STATES, WINDOWS, BOTH])
def test_the_hold_goes_to_who_is_next_and_ends_with_it(beside: dict[str, int]) -> None:
    scheduler, pool = new_scheduler(num_blocks=300, **beside)
    hand_over(scheduler, pool, "oldest", prompt=60, max_tokens=90, salt=70)
    first = hand_over(scheduler, pool, "first", prompt=60, max_tokens=50, salt=0)
    until(lambda: scheduler.resume_point.blocks, scheduler, pool)
    second = hand_over(scheduler, pool, "second", prompt=80, max_tokens=8, salt=40)
    step(scheduler, pool)
    assert not set(scheduler.resume_point.blocks) & set(blocks_of_tokens(first.sequence))
    until(lambda: second not in scheduler.running, scheduler, pool)
    step(scheduler, pool)
    assert set(scheduler.resume_point.blocks) & set(blocks_of_tokens(first.sequence))
    scheduler.remove(first)
    assert scheduler.resume_point.blocks == []
    step(scheduler, pool)
    assert scheduler.resume_point.blocks == []


def test_a_short_sequence_holds_nothing() -> None:
    scheduler, pool = new_scheduler(num_blocks=200, state_blocks=STATE)
    hand_over(scheduler, pool, "short", prompt=7, max_tokens=8, salt=0)
    for _ in range(5):
        step(scheduler, pool)
        assert scheduler.resume_point.blocks == []


def test_what_is_held_counts_as_no_prefix_hit() -> None:
    """Eviction spares what others found. What a sequence holds of its own comes before that."""
    scheduler, pool = new_scheduler(num_blocks=200, state_blocks=STATE)
    popular = [b"popular %d" % number for number in range(2)]
    blocks = pool.allocate(len(popular))
    for block, digest in zip(blocks, popular, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    pool.release(pool.match_prefix(popular))
    hand_over(scheduler, pool, "older", prompt=40, max_tokens=50, salt=50)
    hand_over(scheduler, pool, "next", prompt=60, max_tokens=40, salt=0)
    until(lambda: scheduler.resume_point.blocks, scheduler, pool)
    until(lambda: not len(scheduler), scheduler, pool)

    pool.allocate(pool.num_free - len(popular))

    assert pool.count_prefix(popular) == len(popular)
