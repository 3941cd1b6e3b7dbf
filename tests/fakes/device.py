"""A device that the test drives by hand, and roles that plan one token each: for the worker's pipeline."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as ListOf
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from engine.engine import Chunk, Pass, Sampled
from tests.unit.engine.generate import new_sequence
from worker.device.pipeline import Pipeline

TIMEOUT_S = 60.0  # nothing here takes time: this only ends a test that hangs


@dataclass(eq=False)
class HandPass:
    """A pass that is over when the test says so."""

    chunks: list[Chunk]
    over: threading.Event = field(default_factory=threading.Event)
    waited_for: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def complete(self, error: Exception | None = None) -> None:
        self.error = error
        self.over.set()

    def wait(self) -> list[Sampled | None]:
        self.waited_for.set()
        assert self.over.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return [Sampled(chunk.end, None) if chunk.sample else None for chunk in self.chunks]


class HandEngine:
    """Launches return at once, or raise the errors in `refusals` one after the other."""

    def __init__(self) -> None:
        self.passes: list[HandPass] = []
        self.refusals: list[Exception | None] = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def launch(self, chunks: list[Chunk]) -> Pass:
        refusal = self.refusals.pop(0) if self.refusals else None
        pass_ = HandPass(chunks)
        self.passes.append(pass_)
        self._loop.call_soon_threadsafe(self._changed.set)
        if refusal is not None:
            raise refusal
        return pass_

    async def launched(self, count: int) -> None:
        while len(self.passes) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), TIMEOUT_S)


class HandThread:
    """An executor whose work is done when the test says so, by the test's thread."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, function: Callable[..., object], /, *arguments: object) -> None:
        self._queue.append(lambda: function(*arguments))

    def run_next(self) -> None:
        self._queue.popleft()()

    def shutdown(self, wait: bool = True) -> None:
        while self._queue:
            self.run_next()


class OneTokenEach:
    """Gives each of its sequences one token a pass, as long as it has passes to give."""

    def __init__(self, *names: str, passes: int = 100) -> None:
        self.sequences = [new_sequence(name, [1]) for name in names]
        self.passes = passes
        self.events: list[tuple[str, str, int]] = []  # what happened, to whom, with the chunk that begins where
        self._heard = asyncio.Event()

    def plan(self, token_budget: int) -> list[Chunk]:
        if not self.passes or not self.sequences:
            return []
        self.passes -= 1
        return [sequence.schedule(1) for sequence in self.sequences[:token_budget]]

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None:
        for chunk, sampled in results:
            assert sampled is not None
            assert sampled.token_id == chunk.end
            self._note("applied", chunk)

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None:
        for chunk in chunks:
            self._note(str(error), chunk)
            with suppress(ValueError):
                self.sequences.remove(chunk.sequence)

    async def heard(self, count: int) -> None:
        while len(self.events) < count:
            self._heard.clear()
            await asyncio.wait_for(self._heard.wait(), TIMEOUT_S)

    def _note(self, what: str, chunk: Chunk) -> None:
        self.events.append((what, chunk.sequence.request_id, chunk.start))
        self._heard.set()


@asynccontextmanager
async def running(pipeline: Pipeline, engine: HandEngine) -> AsyncIterator[asyncio.Task[None]]:
    """The pipeline, cancelled at the end; passes that the test left open are completed."""
    task = asyncio.create_task(pipeline.run())
    try:
        yield task
    finally:
        task.cancel()
        for pass_ in engine.passes:
            pass_.complete()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, TIMEOUT_S)


async def settled() -> None:
    """Let the event loop do everything that it can do without another thread."""
    for _ in range(20):
        await asyncio.sleep(0)
