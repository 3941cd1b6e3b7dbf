"""What drives the engine in a measurement: the worker's own device loop and decode scheduler, without bus and gateway.

Each measurement has a fresh loop, scheduler and block pool over one engine. All times are `time.perf_counter()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterable
from collections.abc import Sequence as ListOf

from benchmarks.interim import DecodeScheduler, DeviceLoop
from common.blocks import hash_root, pack_tokens
from common.messages import Job, SamplingParams
from decode.request import DecodeRequest
from engine.block_pool import BlockPool
from engine.engine import Chunk, Engine, Sampled
from engine.sequence import Sequence
from worker.prefix import publish_computed

ROOT = hash_root(model="benchmark", kv_dtype="any", block_size=1)
FOREVER_S = 1e9  # no request of a measurement expires


class Workload:
    """The decode role's part in the device loop: requests in, tokens out, and when each pass was over."""

    def __init__(self, pool: BlockPool, *, max_sequences: int) -> None:
        self.pool = pool
        self.scheduler = DecodeScheduler(pool=pool, max_sequences=max_sequences)
        self.passes_left: int | None = None  # None: until there is nothing to do
        self.pass_ends: list[float] = []
        self.first_token_at: dict[str, float] = {}
        self.plan_s = self.apply_s = 0.0
        self.error: Exception | None = None
        self._requests: dict[Sequence, DecodeRequest] = {}
        self._planned = self._applied = 0
        self._idle = asyncio.Event()

    def enqueue(self, request: DecodeRequest) -> None:
        """A prompt, to be prefilled here."""
        self._requests[request.sequence] = request
        self.scheduler.enqueue(request)
        self._idle.clear()

    def join(self, request: DecodeRequest) -> None:
        """A sequence whose KV is there already."""
        self._requests[request.sequence] = request
        self.scheduler.join(request)
        self._idle.clear()

    async def finished(self) -> None:
        """Return when every request ended, or `passes_left` ran out; raise what a pass raised."""
        await self._idle.wait()
        if self.error is not None:
            raise self.error

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
        self._applied += 1
        for chunk, sampled in results:
            request = self._requests.get(chunk.sequence)
            if request is None:
                continue
            sequence = chunk.sequence
            sequence.finish(chunk)
            publish_computed(self.pool, sequence)
            if not chunk.sample:
                continue
            if sampled is None:
                self.error = RuntimeError(f"{sequence.request_id}: no finite logits")
                break
            if sequence.num_generated == 0:
                self.first_token_at[sequence.request_id] = now
            sequence.append(sampled.token_id)
            if sequence.finish_reason():
                self._end(request)
        self._settle()
        self.apply_s += time.perf_counter() - now

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        self.error = error
        self._idle.set()

    def _end(self, request: DecodeRequest) -> None:
        del self._requests[request.sequence]
        self.scheduler.remove(request)

    def _settle(self) -> None:
        over = not self._requests or self.passes_left == 0 or self.error is not None
        if over and self._applied >= self._planned:
            self._idle.set()


@contextlib.asynccontextmanager
async def driven(engine: Engine, workload: Workload, *, token_budget: int) -> AsyncIterator[DeviceLoop]:
    """Run the device loop with `workload` in it."""
    loop = DeviceLoop(engine=engine, token_budget=token_budget)
    loop.attach(workload)
    running = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class Prompts:
    """Random prompts, each different from all before: the prefix cache finds nothing."""

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
            deadline_ms=int(FOREVER_S),
        )
        sequence = Sequence(
            request_id=job.request_id,
            attempt=job.attempt,
            token_ids=token_ids,
            num_prompt_tokens=length,
            sampling=params,
            hash_root=ROOT,
        )
        deadline_at = time.monotonic() + FOREVER_S
        return DecodeRequest(job=job, sequence=sequence, deadline_at=deadline_at, first_position=0)
