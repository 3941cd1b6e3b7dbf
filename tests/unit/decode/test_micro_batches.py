"""Streams of a model in stages: as many passes as stages, of which each begins with tokens that are known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping

from decode.drafts.speculation import NO_SPECULATION, NoSpeculation, Speculation
from decode.micro_batches import LEAST_ROWS, MicroBatches
from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk
from engine.sequence import Sequence
from tests.unit.decode.scheduling import BLOCK, land, make_request
from worker.serving.allocation import admit


class Staged:
    """A scheduler's passes in stages, which are over in order."""

    def __init__(self, stages: int, *, num_blocks: int = 400, speculation: Speculation = NO_SPECULATION) -> None:
        self.stages = stages
        self.passes = deque[list[Chunk]]()
        self.pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK)
        self.scheduler = DecodeScheduler(
            pool=self.pool,
            max_sequences=64,
            max_model_len=1000,
            speculation=speculation,
        )
        self.scheduler.batches = MicroBatches(stages, lambda: len(self.passes))
        self.num_passes = 0
        self.last = dict[str, int]()  # pass in which each was last

    def streams(self, count: int, *, max_tokens: int = 100, first: int = 0) -> list[DecodeRequest]:
        """Add streams whose next token is the second."""
        requests = [
            make_request(f"s{first + number}", prompt=3, max_tokens=max_tokens, salt=first + number)
            for number in range(count)
        ]
        for request in requests:
            admit(self.pool, request.sequence, num_tokens=4)
            request.sequence.restart(2)
            self.scheduler.join(request)
        return requests

    def plan(self, budget: int = 64) -> list[str]:
        """Launch a pass; the names of its sequences."""
        assert len(self.passes) < max(2, self.stages)
        chunks = self.scheduler.plan(budget)
        if chunks:
            self.num_passes += 1
            self.passes.append(chunks)
        names = [chunk.sequence.request_id for chunk in chunks]
        self.last.update(dict.fromkeys(names, self.num_passes))
        return names

    def over(self) -> list[DecodeRequest]:
        """End the oldest pass; the requests that it finished."""
        return land(self.scheduler, self.pool, self.passes.popleft())


def names(*numbers: int) -> list[str]:
    return [f"s{number}" for number in numbers]


def test_streams_take_turns_in_as_many_passes_as_there_are_stages() -> None:
    staged = Staged(2)
    staged.streams(2 * LEAST_ROWS)
    assert [staged.plan(), staged.plan()] == [names(0, 1, 2, 3), names(4, 5, 6, 7)]
    for expected in (names(0, 1, 2, 3), names(4, 5, 6, 7), names(0, 1, 2, 3)):
        staged.over()
        assert staged.plan() == expected
        assert all(chunk.start == len(chunk.sequence.token_ids) - 1 for chunk in staged.passes[-1]), "tokens are known"


def test_all_streams_are_in_each_pass_of_one_stage() -> None:
    staged = Staged(1)
    staged.streams(9)
    assert staged.plan() == staged.plan() == names(*range(9))


def test_a_few_streams_stay_together_and_run_ahead() -> None:
    staged = Staged(2)
    staged.streams(2 * LEAST_ROWS - 1)
    assert staged.plan() == staged.plan() == names(*range(7))


def test_no_pass_waits_for_a_token_while_others_are_in_flight() -> None:
    """With four stages, a stream alone has the pass that computes its token, and the one behind it."""
    staged = Staged(4)
    staged.streams(1)
    assert [staged.plan(), staged.plan(), staged.plan()] == [names(0), names(0), []]
    staged.over()
    assert staged.plan() == names(0)


def test_streams_apart_that_became_few_come_together_again() -> None:
    staged = Staged(2)
    staged.streams(LEAST_ROWS, max_tokens=2)
    staged.streams(LEAST_ROWS, first=8)
    assert [staged.plan(), staged.plan()] == [names(0, 1, 2, 3), names(8, 9, 10, 11)]
    staged.over()
    assert staged.plan() == names(0, 1, 2, 3)
    staged.streams(1, first=12)
    staged.over()
    assert staged.plan() == names(12, 8, 9, 10, 11)
    assert [request.id for request in staged.over()] == names(0, 1, 2, 3)
    assert staged.plan() == names(8, 9, 10, 11, 12), "ahead, and in one pass"


def test_chunks_of_a_prompt_are_in_the_passes_between() -> None:
    """A stream of which the token is in flight is left out, since the chunk would wait for it."""
    staged = Staged(2)
    staged.streams(1)
    assert staged.plan() == names(0)
    staged.scheduler.enqueue(make_request("prompt", prompt=40, max_tokens=5, salt=50))
    assert staged.plan(10) == ["prompt"]
    staged.over()
    assert staged.plan(11) == ["s0", "prompt"]


def test_drafts_stop_nobody_in_another_stage() -> None:
    class Drafts(NoSpeculation):
        def stops_the_others(self, num_drafting: int, num_running: int) -> bool:
            return num_drafting > 0

        def drafts(
            self, wanted: Mapping[Sequence, int], *, rows: int, most_rows: int
        ) -> Mapping[Sequence, tuple[int, ...]]:
            return dict.fromkeys(wanted, (1, 2))

    staged = Staged(2, speculation=Drafts())
    staged.streams(2 * LEAST_ROWS)
    assert [staged.plan(), staged.plan()] == [names(0, 1, 2, 3), names(4, 5, 6, 7)]
    assert all(chunk.drafted for pass_ in staged.passes for chunk in pass_)


def test_each_stream_gets_its_tokens_in_turn_whoever_comes_and_goes() -> None:
    """Also where blocks run out, so that some give way."""
    preemptions = 0
    for seed in range(30):
        rng = random.Random(seed)
        num_blocks = rng.choice([30, 400])
        staged, added, finished = Staged(rng.choice([2, 3, 4]), num_blocks=num_blocks), 0, list[str]()
        while len(finished) < 40:
            while added < 40 and rng.random() < 0.4 and len(staged.scheduler) < 14 and staged.pool.num_free > 2:
                staged.streams(1, max_tokens=rng.randint(2, 20), first=added)
                staged.last[f"s{added}"] = staged.num_passes
                added += 1
            while len(staged.passes) < staged.stages and staged.plan():
                pass
            if staged.passes:
                finished += [request.id for request in staged.over()]
            for request in staged.scheduler.running:
                waited = staged.num_passes - staged.last[request.id]
                assert num_blocks == 30 or waited <= staged.stages, (seed, request.id)
        assert len(set(finished)) == 40
        preemptions += staged.scheduler.preemptions
    assert preemptions
