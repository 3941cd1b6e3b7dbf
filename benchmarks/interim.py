"""Stands in for `worker.device` and `decode.scheduler` until both overlap passes; then this file goes."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from decode.request import DecodeRequest
from engine.block_pool import BlockPool
from engine.engine import Chunk, Engine, Pass
from worker.device import Planner


class DeviceLoop:
    def __init__(self, *, engine: Engine, token_budget: int) -> None:
        self._engine, self._budget = engine, token_budget
        self._planners: list[Planner] = []
        self._wake = asyncio.Event()
        self._launcher = ThreadPoolExecutor(1)
        self._waiter = ThreadPoolExecutor(1)

    def attach(self, planner: Planner) -> None:
        self._planners.append(planner)

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        flying: deque[tuple[list[Chunk], Pass]] = deque()
        [planner] = self._planners
        try:
            while True:
                self._wake.clear()
                chunks = planner.plan(self._budget)
                if chunks:
                    pass_ = await loop.run_in_executor(self._launcher, self._engine.launch, chunks)
                    flying.append((chunks, pass_))
                if len(flying) == 2 or (flying and not chunks):
                    done, pass_ = flying.popleft()
                    results = await loop.run_in_executor(self._waiter, pass_.wait)
                    planner.apply(list(zip(done, results, strict=True)))
                elif not flying:
                    await self._wake.wait()
        finally:
            self._launcher.shutdown()
            self._waiter.shutdown()


class DecodeScheduler:
    def __init__(self, *, pool: BlockPool, max_sequences: int) -> None:
        self._pool, self._max_sequences = pool, max_sequences
        self.running: list[DecodeRequest] = []
        self.waiting: deque[DecodeRequest] = deque()
        self.preemptions = 0

    def join(self, request: DecodeRequest) -> None:
        self.running.append(request)

    def enqueue(self, request: DecodeRequest) -> None:
        self.waiting.append(request)

    def remove(self, request: DecodeRequest) -> None:
        self.running.remove(request)
        self._pool.release(request.sequence.block_table)

    def plan(self, budget: int) -> list[Chunk]:
        chunks = []
        for request in sorted(self.running, key=lambda request: request.sequence.num_unscheduled > 1):
            sequence = request.sequence
            if sequence.num_tokens - sequence.num_prompt_tokens >= sequence.sampling.max_tokens:
                continue
            if count := min(sequence.num_unscheduled, budget):
                need = sequence.blocks_needed(sequence.num_scheduled + count, self._pool.block_size)
                sequence.block_table.extend(self._pool.allocate(need))
                chunks.append(sequence.schedule(count))
                budget -= count
        while self.waiting and budget and len(self.running) < self._max_sequences:
            request = self.waiting.popleft()
            self.running.append(request)
            sequence = request.sequence
            need = sequence.blocks_needed(len(sequence.token_ids) + 1, self._pool.block_size)
            sequence.block_table.extend(self._pool.allocate(need))
            count = min(sequence.num_unscheduled, budget)
            chunks.append(sequence.schedule(count))
            budget -= count
        return chunks
