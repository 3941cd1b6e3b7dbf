"""Passes over the inputs of all requests, one at a time in a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from common.errors import DeadlineExceededError, OverloadedError, ServingError, StepFailedError, UnavailableError
from common.messages import Pool, Pooled
from common.tracing import Attributes, Children, NoTracer, Tracer
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
    found: Sequence[int]  # tokens of each input of the last `compute` that others had computed

    def compute(self, inputs: Sequence[PoolingInput]) -> list[torch.Tensor]: ...


class Passes:
    """Answers messages while `run` runs. Its numbers are for heartbeats."""

    def __init__(self, engine: Pools, *, max_batch_tokens: int, tracer: Tracer | None = None, worker: str = "") -> None:
        self._engine, self._most = engine, max_batch_tokens
        self._tracer, self._worker = tracer or NoTracer(), worker
        self._ends = dict[str, asyncio.Future[None]]()  # by the names of messages
        self._some = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="passes")
        self.queue = Queue()
        self.running = list[Place]()
        self.began_at = 0.0
        self.steps = self.tokens = self.found = self.failed = self.answering = 0
        self._lost = ""
        self.pass_s = self.tokens_per_s = 0.0

    def broken(self, most_s: float) -> str:
        """The reason that no further pass will end well; "" while they do. `most_s`: a longer one hangs."""
        took_s = time.monotonic() - self.began_at if self.running else 0.0
        return self._lost or (f"a pass takes {took_s:.0f} s" if took_s > most_s else "")

    async def answer(self, message: Pool) -> Pooled:
        """The rows of a message's inputs, or the reason that there are none."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_seen)
        self._ends[message.request_id] = done
        self.answering += 1
        try:
            return await self._answer(message, done)
        finally:
            self.answering -= 1
            if self._ends.get(message.request_id) is done:
                del self._ends[message.request_id]

    def cancel(self, name: str) -> bool:
        """Compute no input of a message that has not begun: nobody waits for it. False: it is not here."""
        done = self._ends.get(name)
        if done is None or done.done():
            return False
        done.set_exception(UnavailableError("nobody waits for it any more"))
        return True

    async def _answer(self, message: Pool, done: asyncio.Future[None]) -> Pooled:
        engine, now = self._engine, time.monotonic()
        asked, outcome = Asked([], now, now, done), ""
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
            until = now + message.remaining_ms / 1000
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
            outcome = error.code
            return Pooled(code=error.code, message=error.message)
        finally:
            self._record(message, asked, outcome)
        return await asyncio.to_thread(_told, asked)

    def _record(self, message: Pool, asked: Asked, outcome: str) -> None:
        """Record a message's spans: its wait, and the passes with its inputs."""
        parent = message.traceparent or ""
        if not self._tracer.wants(parent):
            return
        now = time.monotonic()
        told: Attributes = {"baton.request_id": message.request_id, "baton.worker": self._worker}
        children = Children(self._tracer, parent, told)
        children.record("wait", asked.come_at, asked.began_at or now, {}, outcome="" if asked.began_at else outcome)
        if asked.began_at:
            attributes: Attributes = {
                "baton.inputs": len(asked.inputs),
                "baton.computed_tokens": asked.tokens - asked.found,
                "baton.cached_tokens": asked.found,
                "baton.pass_tokens": asked.pass_tokens,
                "baton.compute_ms": round(1000 * asked.compute_s, 3),
            }
            children.record("pool", asked.began_at, now, attributes, outcome=outcome)

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
        for place in places:
            place.asked.began_at = place.asked.began_at or self.began_at
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
        counts = self._engine.found or [0] * len(places)
        self.found += sum(counts)
        for place, found, count in zip(places, rows, counts, strict=True):
            asked = place.asked
            asked.found += count
            asked.queue_s = max(asked.queue_s, self.began_at - asked.come_at)
            asked.compute_s, asked.pass_tokens = asked.compute_s + seconds, max(asked.pass_tokens, size)
            asked.take(place.at, found)
        return True


def _seen(done: asyncio.Future[None]) -> None:
    """Take an error that nobody awaits: its message ended before."""
    if not done.cancelled():
        done.exception()


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
        cached_tokens=asked.found,
    )
