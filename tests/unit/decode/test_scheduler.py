"""The continuous batch under random arrivals, lengths and pool sizes: nobody starves, no block is lost or shared by mistake."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.drafts.speculation import NoSpeculation
from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk
from tests.examples import examples
from tests.unit.decode.scheduling import BLOCK, Bounded, land, make_request, new_scheduler
from tests.unit.engine.tables import table_of
from worker.device.trials import Trials
from worker.serving.allocation import blocks_for


def join(scheduler: DecodeScheduler, pool: BlockPool, *names: str) -> list[DecodeRequest]:
    """Running requests of seven tokens with two blocks each, nothing computed."""
    requests = [make_request(name, prompt=7, max_tokens=9, salt=20 * index) for index, name in enumerate(names)]
    for request in requests:
        request.sequence.tables = [table_of(pool.allocate(2))]
        scheduler.join(request)
    return requests


def hand_over(scheduler: DecodeScheduler, pool: BlockPool, request: DecodeRequest, max_sequences: int) -> bool:
    """Join with blocks for the prompt and a token, if a handoff would find room."""
    needed = blocks_for(request.sequence.num_tokens + 1, BLOCK)
    if len(scheduler.running) >= max_sequences or pool.num_free < needed + len(scheduler.running):
        return False
    request.sequence.tables = [table_of(pool.allocate(needed))]
    scheduler.join(request)
    return True


def run_step(scheduler: DecodeScheduler, pool: BlockPool, budget: int) -> list[DecodeRequest]:
    """One pass with nothing else in flight; returns the requests that finished in it."""
    return land(scheduler, pool, plan(scheduler, budget))


def plan(scheduler: DecodeScheduler, budget: int) -> list[Chunk]:
    chunks = scheduler.plan(budget)
    assert sum(chunk.num_tokens for chunk in chunks) <= budget
    assert all(len(chunk.sequence.tables[0].entries) * BLOCK >= chunk.end for chunk in chunks)
    return chunks


def names(chunks: list[Chunk]) -> list[str]:
    return [chunk.sequence.request_id for chunk in chunks]


@examples(40)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 40),
    budget=st.integers(8, 32),
    max_sequences=st.integers(1, 8),
    depth=st.sampled_from([1, 2]),
    suspects=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_every_request_finishes_and_every_block_comes_back(
    seed: int, num_blocks: int, budget: int, max_sequences: int, depth: int, suspects: float
) -> None:
    """As the device does, a pass is planned only when one is over or a request came: an empty plan is the last till then."""
    rng, trials = random.Random(seed), Trials()
    scheduler, pool = new_scheduler(num_blocks=num_blocks, max_sequences=max_sequences, trials=trials)
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
    in_flight: deque[list[Chunk]] = deque()
    for _ in range(20_000):
        if pending and (not len(scheduler) or rng.random() < 0.3):
            request = pending.pop()
            request.sequence.suspect_until = rng.randint(1, limit) if rng.random() < suspects else 0
            trials.watch(request.sequence, "gw")
            if rng.random() < 0.5 or not hand_over(scheduler, pool, request, max_sequences):
                scheduler.enqueue(request)
        while len(in_flight) < depth and (chunks := plan(scheduler, budget)):
            trials.planned(chunks)
            in_flight.append(chunks)
        assert len(scheduler.running) <= max_sequences
        assert in_flight or not len(scheduler), "asleep with work to do"
        if in_flight:
            chunks = in_flight.popleft()
            trials.landed(chunks)
            finished += land(scheduler, pool, chunks)
        if len(finished) == expected:
            break
    assert len(finished) == expected
    for chunks in in_flight:
        land(scheduler, pool, chunks)
    assert pool.num_free == num_blocks
    assert all(request.sequence.num_generated == request.sequence.sampling.max_tokens for request in finished)


def test_a_decoding_sequence_gets_its_token_before_a_long_prompt_gets_the_budget() -> None:
    scheduler, pool = new_scheduler(num_blocks=64)
    short = make_request("short", prompt=3, max_tokens=10)
    scheduler.enqueue(short)
    run_step(scheduler, pool, 8)
    scheduler.enqueue(make_request("long", prompt=100, max_tokens=10, salt=5))
    chunks = scheduler.plan(8)
    assert [(chunk.sequence.request_id, chunk.num_tokens) for chunk in chunks] == [("short", 1), ("long", 7)]


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    scheduler, pool = new_scheduler(num_blocks=6)
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


def test_a_suspect_that_gives_way_leaves_the_pass_to_one_that_was_held_back_for_it() -> None:
    trials = Trials()
    scheduler, pool = new_scheduler(num_blocks=4, trials=trials)
    older, younger = make_request("older", prompt=6, max_tokens=9), make_request("younger", prompt=9, max_tokens=9)
    for request in (older, younger):  # all blocks are taken, and the younger one needs a third
        request.sequence.suspect_until = 9
        trials.watch(request.sequence, "gw")
        request.sequence.tables = [table_of(pool.allocate(2))]
        scheduler.join(request)
    older.sequence.append(1)  # so it is the younger one's turn
    assert names(plan(scheduler, 16)) == ["older"]
    assert list(scheduler.waiting) == [younger]


def test_a_sequence_goes_on_with_the_token_that_a_pass_in_flight_samples() -> None:
    scheduler, pool = new_scheduler(num_blocks=8)
    scheduler.enqueue(make_request("a", prompt=5, max_tokens=3))

    first, second = plan(scheduler, 8), plan(scheduler, 8)

    assert [(chunk.start, chunk.num_tokens, chunk.sample) for chunk in first + second] == [(0, 5, True), (5, 1, True)]
    land(scheduler, pool, first)
    assert [chunk.start for chunk in plan(scheduler, 8)] == [6]


@pytest.mark.parametrize("room", [2, 100])
def test_a_sequence_whose_last_token_is_in_flight_is_not_planned_again(room: int) -> None:
    """Whether `max_tokens` or the longest sequence ends it."""
    pool = BlockPool(num_blocks=8, block_size=BLOCK)
    scheduler = DecodeScheduler(pool=pool, max_sequences=8, max_model_len=5 + room)
    scheduler.enqueue(make_request("a", prompt=5, max_tokens=4 - room if room == 2 else 2))
    first, second = plan(scheduler, 8), plan(scheduler, 8)
    assert names(second) == ["a"]
    land(scheduler, pool, first)
    assert plan(scheduler, 8) == []


def test_a_prompt_goes_on_while_its_first_chunk_is_in_flight() -> None:
    scheduler, _ = new_scheduler(num_blocks=8)
    scheduler.enqueue(make_request("a", prompt=10, max_tokens=3))
    chunks = plan(scheduler, 6) + plan(scheduler, 6)
    assert [(chunk.start, chunk.num_tokens, chunk.sample) for chunk in chunks] == [(0, 6, False), (6, 4, True)]


def test_a_sequence_that_leaves_keeps_its_blocks_until_its_last_pass_is_over() -> None:
    scheduler, pool = new_scheduler(num_blocks=8)
    request = make_request("a", prompt=5, max_tokens=9)
    scheduler.enqueue(request)
    first, second = plan(scheduler, 8), plan(scheduler, 8)
    held, request.stopped = pool.num_used, "cancelled"

    scheduler.remove(request)

    assert (len(scheduler), pool.num_used) == (0, held)
    land(scheduler, pool, first)
    assert pool.num_used == held
    land(scheduler, pool, second)
    assert pool.num_used == 0


def test_a_sequence_in_flight_is_preempted_by_the_plan_after_the_next() -> None:
    """The next one leaves it out, and with it whom its blocks are for; the one after that finds it free."""
    scheduler, pool = new_scheduler(num_blocks=4)
    join(scheduler, pool, "old", "young")
    run_step(scheduler, pool, 16)
    first = plan(scheduler, 16)  # the eighth tokens, which fill the pool
    assert names(first) == ["old", "young"]

    second = plan(scheduler, 16)  # the ninth would need a third block each

    assert second == []
    land(scheduler, pool, first)
    assert names(plan(scheduler, 16)) == ["old"]
    assert [request.id for request in scheduler.waiting] == ["young"]


def test_blocks_of_a_sequence_that_left_are_waited_for_before_anybody_is_preempted() -> None:
    scheduler, pool = new_scheduler(num_blocks=6)
    requests = join(scheduler, pool, "a", "b", "c")
    run_step(scheduler, pool, 30)
    first = plan(scheduler, 2)
    assert names(first) == ["a", "b"]
    requests[1].stopped = "cancelled"
    scheduler.remove(requests[1])

    second = plan(scheduler, 16)  # "a" needs a block now; "c", the youngest, does not, and could be preempted

    assert names(second) == ["c"]
    land(scheduler, pool, first)
    assert names(plan(scheduler, 16)) == ["a", "c"]
    assert scheduler.preemptions == 0


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, BLOCK) == blocks


def test_prompts_computed_here_don_t_make_a_decode_batch_wait() -> None:
    """A few of a prompt's tokens beside those that decode; the whole budget when nobody does."""
    pool = BlockPool(num_blocks=64, block_size=BLOCK)
    scheduler = DecodeScheduler(
        pool=pool,
        max_sequences=8,
        max_model_len=256,
        pacing=Bounded(lambda waiting, decoding, context: 5 if waiting <= 30 else 9),
    )
    (running,) = join(scheduler, pool, "a")
    assert [chunk.num_tokens for chunk in plan(scheduler, 40)] == [7]
    land(scheduler, pool, [Chunk(running.sequence, 0, 7, True)])
    scheduler.enqueue(make_request("b", prompt=30, max_tokens=2, salt=99))
    assert [(chunk.sequence.request_id, chunk.num_tokens) for chunk in plan(scheduler, 40)] == [("a", 1), ("b", 5)]
    scheduler.enqueue(make_request("c", prompt=30, max_tokens=2, salt=199))
    land(scheduler, pool, [Chunk(running.sequence, 7, 1, True)])
    assert [(chunk.sequence.request_id, chunk.num_tokens) for chunk in plan(scheduler, 40)] == [("a", 1), ("b", 9)]
    scheduler.remove(running)
    assert [(chunk.sequence.request_id, chunk.num_tokens) for chunk in plan(scheduler, 16)] == [("b", 16)]


def test_prompts_alone_are_bounded_while_a_hand_over_is_on_its_way() -> None:
    """Nobody knows when it comes, and its second token would wait for the pass that it finds."""
    expected = 1
    scheduler = DecodeScheduler(
        pool=BlockPool(num_blocks=64, block_size=BLOCK),
        max_sequences=8,
        max_model_len=256,
        pacing=Bounded(lambda waiting, decoding, context: 12 if decoding == 0 else 5),
        expected=lambda: expected,
    )
    scheduler.enqueue(make_request("a", prompt=40, max_tokens=2))
    assert [chunk.num_tokens for chunk in plan(scheduler, 40)] == [12]
    expected = 0
    assert [chunk.num_tokens for chunk in plan(scheduler, 40)] == [28]


def test_who_is_about_to_join_has_its_place() -> None:
    expected = 1
    pool = BlockPool(num_blocks=64, block_size=BLOCK)
    scheduler = DecodeScheduler(pool=pool, max_sequences=2, max_model_len=256, expected=lambda: expected)
    for name in ("a", "b"):
        scheduler.enqueue(make_request(name, prompt=8, max_tokens=2))
    plan(scheduler, 40)
    assert [request.id for request in scheduler.running] == ["a"]
    expected = 0
    plan(scheduler, 40)
    assert [request.id for request in scheduler.running] == ["a", "b"]


def test_the_bound_is_told_how_far_the_prompt_is() -> None:
    told: list[int | None] = []

    def budget(waiting: int, decoding: int, context: int | None) -> int:
        told.append(context)
        return 8

    pool = BlockPool(num_blocks=64, block_size=BLOCK)
    scheduler = DecodeScheduler(pool=pool, max_sequences=8, max_model_len=256, pacing=Bounded(budget))
    (running,) = join(scheduler, pool, "a")
    land(scheduler, pool, plan(scheduler, 40))
    scheduler.enqueue(make_request("b", prompt=30, max_tokens=2, salt=99))
    for at in (7, 8):
        assert [chunk.num_tokens for chunk in plan(scheduler, 40)] == [1, 8]
        land(scheduler, pool, [Chunk(running.sequence, at, 1, True)])
    assert told == [None, 8]


class FarAhead(NoSpeculation):
    """Heads that need room for many positions behind a pass's, and never draft."""

    ahead = 9


def test_no_sequence_gets_blocks_beyond_the_longest_context_for_drafts() -> None:
    pool, longest = BlockPool(num_blocks=100, block_size=BLOCK), 8 * BLOCK
    scheduler = DecodeScheduler(pool=pool, max_sequences=1, max_model_len=longest, speculation=FarAhead())
    request = make_request("r", prompt=longest - 6, max_tokens=5)
    scheduler.enqueue(request)
    most = 0
    while len(scheduler):
        chunks = scheduler.plan(1000)
        most = max(most, len(request.sequence.tables[0].entries))
        land(scheduler, pool, chunks)
    assert most == longest // BLOCK
