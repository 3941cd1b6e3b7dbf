"""Passes over the inputs of all requests, one at a time in a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from common.errors import DeadlineExceededError, OverloadedError, ServingError, StepFailedError
from common.messages import Pool, Pooled
from engine.pooling.engine import PoolingInput
from modelfiles.pooling import Pooling
from worker.device.pipeline import is_lost
from worker.pooling.queue import Asked, Place, Queue, inputs_of

log = logging.getLogger("baton.worker")

MAX_WAITING_TOKENS = 1 << 22
MEMORY_OF_RATES = 0.8  # share of the average so far


class Pools(Protocol):
    """A worker's view of its engine."""

    fingerprint: str
    vocab_size: int
    max_model_len: int
    pooling: Pooling

    def compute(self, inputs: Sequence[PoolingInput]) -> list[torch.Tensor]: ...


class Passes:
    """Answers messages while `run` runs. Its numbers are for heartbeats."""

    def __init__(self, engine: Pools, *, max_batch_tokens: int) -> None:
        self._engine, self._most = engine, max_batch_tokens
        self._some = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="passes")
        self.queue = Queue()
        self.running = list[Place]()
        self.began_at = 0.0
        self.steps = self.tokens = self.failed = self.answering = 0
        self._lost = ""
        self.pass_s = self.tokens_per_s = 0.0

    def broken(self, most_s: float) -> str:
        """The reason that no further pass will end well; "" while they do. `most_s`: a longer one hangs."""
        took_s = time.monotonic() - self.began_at if self.running else 0.0
        return self._lost or (f"a pass takes {took_s:.0f} s" if took_s > most_s else "")

    async def answer(self, message: Pool) -> Pooled:
        """The rows of a message's inputs, or the reason that there are none."""
        self.answering += 1
        try:
            return await self._answer(message)
        finally:
            self.answering -= 1

    async def _answer(self, message: Pool) -> Pooled:
        engine, now = self._engine, time.monotonic()
        try:
            if self.queue.tokens > MAX_WAITING_TOKENS:
                raise OverloadedError(f"{self.queue.tokens} tokens wait already")
            inputs = await asyncio.to_thread(
                inputs_of,
                message,
                vocab_size=engine.vocab_size,
                longest=engine.max_model_len,
                works=engine.pooling.works,
                size=engine.pooling.size,
                tasks=engine.pooling.tasks,
            )
            until, done = now + message.remaining_ms / 1000, asyncio.get_running_loop().create_future()
            asked = Asked(inputs, now, until, done)
            self.queue.add(asked)
            self._some.set()
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await done
            except TimeoutError:
                done.cancel()
                raise DeadlineExceededError("the deadline passed before the texts were computed") from None
        except ServingError as error:
            return Pooled(code=error.code, message=error.message)
        return await asyncio.to_thread(_told, asked)

    async def run(self) -> None:
        """Compute what waits, a pass at a time, until cancelled."""
        try:
            while True:
                await self._some.wait()
                places = self.queue.take(self._most)
                if not places:
                    self._some.clear()
                    continue
                if await self._pass(places) or len(places) == 1:
                    continue
                for place in places:  # one of them may be to blame
                    await self._pass([place])
        finally:
            self._thread.shutdown(wait=False)

    async def _pass(self, places: list[Place]) -> bool:
        """Compute these inputs, and answer; False if the pass failed."""
        self.running, self.began_at = places, time.monotonic()
        size = sum(len(place.input.tokens) for place in places)
        try:
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._thread, self._engine.compute, [place.input for place in places])
        except Exception as error:  # whatever it is, who asked is answered
            self.failed += 1
            log.exception("device.pass_failed", extra={"inputs": len(places), "error": str(error)[:200]})
            if is_lost(error):
                self._lost = f"{type(error).__name__}: {error}".splitlines()[0]
            if len(places) == 1:
                places[0].asked.fail(StepFailedError("the pass with this input failed; the worker's log says why"))
            return False
        finally:
            self.running = []
        seconds = time.monotonic() - self.began_at
        self.steps, self.tokens, self.pass_s = self.steps + 1, self.tokens + size, self.pass_s + seconds
        rate = size / max(seconds, 1e-6)
        known = self.tokens_per_s
        self.tokens_per_s = MEMORY_OF_RATES * known + (1 - MEMORY_OF_RATES) * rate if known else rate
        for place, found in zip(places, rows, strict=True):
            asked = place.asked
            asked.queue_s = max(asked.queue_s, self.began_at - asked.come_at)
            asked.compute_s, asked.pass_tokens = asked.compute_s + seconds, max(asked.pass_tokens, size)
            asked.take(place.at, found)
        return True


def _told(asked: Asked) -> Pooled:
    rows = [each for each in asked.rows if each is not None]
    values = torch.cat(rows).contiguous()
    counts = [len(each) for each in rows]
    return Pooled(
        values=values.numpy().tobytes(),
        width=values.shape[1],
        rows=counts if any(count != 1 for count in counts) else [],
        queue_ms=1000 * asked.queue_s,
        compute_ms=1000 * asked.compute_s,
        pass_tokens=asked.pass_tokens,
    )
