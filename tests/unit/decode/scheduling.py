"""Requests and passes for tests of the decode scheduler."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from common.messages import Job, SamplingParams
from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk
from engine.sequence import Sequence
from tests.unit.engine.tables import groups_with
from worker.device.trials import Trials
from worker.serving.allocation import publish_computed
from worker.serving.turns import Turns

BLOCK = 4


@dataclass
class Bounded:
    """First come, first served, so many tokens beside streams: by tokens that wait, streams, and what is before the first."""

    most: Callable[[int, int, int | None], int]

    def turn(self, request: DecodeRequest) -> float:
        return 0.0

    def tokens(self, streams: ListOf[DecodeRequest], prompts: ListOf[DecodeRequest], *, context: int | None) -> int:
        return self.most(sum(prompt.sequence.num_unscheduled for prompt in prompts), len(streams), context)

    def tokens_alone(self) -> int:
        return 1 << 30


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


def new_scheduler(
    *, num_blocks: int, max_sequences: int = 8, trials: Trials | None = None, turns: Turns | None = None, **beside: int
) -> tuple[DecodeScheduler, BlockPool]:
    """`beside`: how many blocks a state has, or a window's entry, and the window."""
    pool = BlockPool(num_blocks=num_blocks, block_size=BLOCK, groups=groups_with(BLOCK, **beside))
    limit = num_blocks * BLOCK
    scheduler = DecodeScheduler(pool=pool, max_sequences=max_sequences, max_model_len=limit, trials=trials, turns=turns)
    return scheduler, pool


def land(scheduler: DecodeScheduler, pool: BlockPool, chunks: list[Chunk], *, token: int = 7) -> list[DecodeRequest]:
    """Give every sequence of a pass its result as the role does; returns the requests that finished with it."""
    finished = []
    for chunk in chunks:
        request = scheduler.landed(chunk)
        if request.is_over:
            continue
        sequence = chunk.sequence
        sequence.finish(chunk)
        publish_computed(pool, sequence)
        if chunk.sample:
            sequence.append(token)
            if sequence.finish_reason():
                request.ended_at = 1.0
                scheduler.remove(request)
                finished.append(request)
    return finished
