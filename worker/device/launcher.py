"""Two threads between the event loop and the device: one launches passes, the other waits for their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from engine.engine import Chunk, Pass, Sampled
from engine.passes import Finished
from engine.sequence import Sequence

Clock = Callable[[], float]


class SteppingEngine(Protocol):
    """The launcher's view of an engine."""

    def launch(self, chunks: list[Chunk]) -> Pass: ...


class Thread(Protocol):
    """A single-threaded executor: jobs run in the order of `submit`."""

    def submit(self, function: Callable[..., object], /, *arguments: object) -> object: ...

    def shutdown(self, wait: bool = True) -> None: ...


@dataclass(frozen=True, slots=True)
class Threads:
    launching: Thread
    waiting: Thread

    @classmethod
    def start(cls) -> Threads:
        return cls(
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="device"),
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="device-wait"),
        )


@dataclass(slots=True, eq=False)
class Launch:
    """A pass from its plan to its results, which `over` holds."""

    shares: list[list[Chunk]]  # one list for each planner
    submitted_at: float
    over: Future[dict[Chunk, Sampled | None]] = field(default_factory=Future)
    began_at: float = 0.0
    launched_at: float = 0.0  # when the device had all of it
    over_at: float = 0.0
    chunks: list[Chunk] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = [chunk for share in self.shares for chunk in share]


class Launcher:
    """Launches passes in order, and stores the results of each in its `Launch`."""

    def __init__(self, engine: SteppingEngine, *, threads: Threads | None = None, clock: Clock | None = None) -> None:
        self._engine = engine
        self._threads = threads or Threads.start()
        self._clock = clock or time.monotonic
        self._refused = WeakSet[Sequence]()  # lost by launches that failed; used by the launching thread alone

    def submit(self, shares: list[list[Chunk]], *, when_over: Callable[[], object]) -> Launch:
        """Launch a pass of these chunks after the previous one. `when_over()` runs on this event loop."""
        loop, launch = asyncio.get_running_loop(), Launch(shares, submitted_at=self._clock())
        launch.over.add_done_callback(lambda _: loop.call_soon_threadsafe(when_over))
        self._threads.launching.submit(self._launch, launch)
        return launch

    async def close(self, launches: Iterable[Launch]) -> None:
        """Wait for these passes, then end the threads."""
        try:
            waits = [asyncio.wrap_future(launch.over) for launch in launches]
            if waits:
                await asyncio.wait(waits)
        finally:
            self._threads.launching.shutdown(wait=True)
            self._threads.waiting.shutdown(wait=True)

    # -- in the other threads ------------------------------------------------------------------------------------------

    def _launch(self, launch: Launch) -> None:
        """Launch without sequences that an earlier launch lost: their tokens and KV are missing."""
        launch.began_at = self._clock()
        chunks = [chunk for chunk in launch.chunks if chunk.sequence not in self._refused]
        try:
            pass_ = self._engine.launch(chunks) if chunks else Finished([])
        except BaseException as error:
            self._refused.update(chunk.sequence for chunk in launch.chunks)
            self._fail(launch, error)
            return
        launch.launched_at = self._clock()
        if isinstance(pass_, Finished):
            self._finish(launch, chunks, pass_)
        else:
            self._threads.waiting.submit(self._finish, launch, chunks, pass_)

    def _finish(self, launch: Launch, chunks: list[Chunk], pass_: Pass) -> None:
        """Wait for the results of `chunks` and publish them."""
        try:
            results = pass_.wait()
        except BaseException as error:
            self._fail(launch, error)
            return
        launch.over_at = self._clock()
        launch.over.set_result(dict(zip(chunks, results, strict=True)))

    def _fail(self, launch: Launch, error: BaseException) -> None:
        launch.over_at = self._clock()
        launch.over.set_exception(error)
