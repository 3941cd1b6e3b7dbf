"""The driver of the engine in a measurement: the worker's own pipeline and decode scheduler, without bus and gateway.

Each measurement has its own loop, scheduler and block pool; they share one engine. All times are `time.perf_counter()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterable
from collections.abc import Sequence as ListOf

from common.blocks import hash_root, pack_tokens
from common.messages import Job, SamplingParams
from decode.drafts.speculation import NO_SPECULATION, Speculation
from decode.micro_batches import MicroBatches
from decode.request import DecodeRequest
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from engine.engine import Chunk, Engine, Sampled
from engine.sequence import Sequence
from worker.device.pipeline import Pipeline
from worker.device.prompt_budget import PromptBudget
from worker.serving.allocation import publish_computed

ROOT = hash_root(model="benchmark", kv_dtype="any", block_size=1)
UNREACHED_S = 1e9  # a deadline that no measurement reaches


class Workload:
    """The decode role's part in the pipeline: requests in, tokens out, and when each pass was over."""

    def __init__(self, engine: Engine, *, speculation: Speculation = NO_SPECULATION, stages: int = 1) -> None:
        self.stages = stages
        self.pool = BlockPool.of(engine.layout)
        self.scheduler = DecodeScheduler(
            pool=self.pool,
            max_sequences=engine.config.max_sequences,
            max_model_len=engine.max_model_len,
            speculation=speculation,
        )
        if stages > 1:
            self.scheduler.batches = MicroBatches(stages, lambda: self._planned - self._over)
        self.passes_left: int | None = None  # None: as many as there is work for
        self.pass_ends: list[float] = []
        self.first_token_at: dict[str, float] = {}
        self.plan_s = self.apply_s = 0.0
        self.error: Exception | None = None
        self._planned = self._over = 0  # passes
        self._idle = asyncio.Event()

    def enqueue(self, request: DecodeRequest) -> None:
        """Take a prompt, to be prefilled here."""
        self.scheduler.enqueue(request)
        self._idle.clear()

    def join(self, request: DecodeRequest) -> None:
        """Take a sequence whose KV is in the pool already."""
        self.scheduler.join(request)
        self._idle.clear()

    async def finished(self) -> None:
        """Return when every request ended, or `passes_left` ran out; raise what a pass raised."""
        await self._idle.wait()
        if self.error is not None:
            raise self.error

    def backlog(self) -> int:
        """Prompt tokens that are in no pass yet."""
        return sum(max(0, request.sequence.num_unscheduled - 1) for request in self.scheduler)

    def plan(self, token_budget: int) -> list[Chunk]:
        started = time.perf_counter()
        if self.passes_left == 0 or self.error is not None:
            return []
        chunks = self.scheduler.plan(token_budget)
        if chunks:
            self._planned += 1
            if self.passes_left is not None:
                self.passes_left -= 1
        self.plan_s += time.perf_counter() - started
        return chunks

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        now = time.perf_counter()
        self.pass_ends.append(now)
        self._over += 1
        for chunk, sampled in results:
            request = self.scheduler.landed(chunk)
            if request.is_over:
                continue
            tokens = self.tokens_of(chunk, sampled) if chunk.sample else []
            chunk.sequence.finish(chunk, max(0, len(tokens) - 1))
            publish_computed(self.pool, chunk.sequence)
            if chunk.sample:
                self._append(request, tokens, now)
        if self._planned == self._over and (self.passes_left == 0 or not len(self.scheduler)):
            self._idle.set()
        self.apply_s += time.perf_counter() - now

    def tokens_of(self, chunk: Chunk, sampled: Sampled | None) -> list[int]:
        """The chunk's new tokens; [] without usable logits."""
        return [] if sampled is None else [sampled.token_id]

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        self.error = error
        self._idle.set()

    def _append(self, request: DecodeRequest, tokens: ListOf[int], now: float) -> None:
        sequence = request.sequence
        if not tokens:
            self.failed([], RuntimeError(f"{request.id}: no finite logits"))
            return
        if sequence.num_generated == 0:
            self.first_token_at[request.id] = now
        for token in tokens:
            sequence.append(token)
        if sequence.finish_reason():
            request.ended_at = now
            self.scheduler.remove(request)


@contextlib.asynccontextmanager
async def driven(engine: Engine, workload: Workload, *, budget: PromptBudget) -> AsyncIterator[Pipeline]:
    """Run the pipeline with `workload` in it."""
    pipeline = Pipeline(engine=engine, budget=budget, stages=workload.stages)
    pipeline.attach(workload, backlog=workload.backlog)
    running = asyncio.create_task(pipeline.run())
    try:
        yield pipeline
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class Prompts:
    """Random prompts that have nothing in common, so the prefix cache finds nothing."""

    def __init__(self, *, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._count = 0

    def requests(
        self, lengths: Iterable[int], *, max_tokens: int, sampling: dict[str, float] | None = None
    ) -> list[DecodeRequest]:
        """One request for each prompt length, without stop tokens; greedy unless `sampling` says otherwise."""
        return [self._request(length, max_tokens, sampling or {"temperature": 0.0}) for length in lengths]

    def _request(self, length: int, max_tokens: int, sampling: dict[str, float]) -> DecodeRequest:
        self._count += 1
        token_ids = self._random.choices(range(self._vocab_size), k=length)
        params = SamplingParams(max_tokens=max_tokens, seed=self._count, **sampling)  # type: ignore[arg-type]
        job = Job(
            request_id=f"benchmark-{self._count}",
            attempt=1,
            gateway="benchmark",
            token_ids=pack_tokens(token_ids),
            num_prompt_tokens=length,
            hash_root=ROOT,
            sampling=params,
            decode_workers=[],
            deadline_ms=int(UNREACHED_S),
        )
        sequence = Sequence(
            request_id=job.request_id,
            attempt=job.attempt,
            token_ids=token_ids,
            num_prompt_tokens=length,
            sampling=params,
            hash_root=ROOT,
        )
        deadline_at = time.monotonic() + UNREACHED_S
        return DecodeRequest(job=job, sequence=sequence, deadline_at=deadline_at, first_position=0)
