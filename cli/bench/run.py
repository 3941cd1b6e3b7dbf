"""Sending the load with bounded concurrency. `Run.samples` always has the finished requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cli.bench.client import ERRORS, Connection, Sample, Target
from cli.bench.load import arrivals, bodies
from cli.bench.settings import BenchSettings

TIMEOUT_S = 600.0  # a request that takes longer is an error


@dataclass(slots=True)
class Run:
    """One run: samples of finished requests, and the number of open ones."""

    started: float = 0.0
    ended: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    late: list[float] = field(default_factory=list)  # seconds by which requests were sent late
    in_flight: int = 0
    peak: int = 0  # highest number of requests in flight
    interrupted: bool = False
    settled: bool = False  # ended early: too many requests had missed the objectives


class LoadGenerator:
    """The sender of `settings`' load to `target`, on reused connections. `seed` determines prompts and arrivals."""

    def __init__(
        self, settings: BenchSettings, target: Target, model: str, on_ended: Callable[[Run, Sample], None], seed: int
    ) -> None:
        self._settings, self._target, self._model, self._seed = settings, target, model, seed
        self._on_ended = on_ended
        self._idle: list[Connection] = []
        self.run = Run()

    async def warm_up(self) -> list[Sample]:
        """Send uncounted requests one by one, with other prompts than the load's."""
        warm = bodies(self._settings, self._model, self._settings.num_warmups, self._seed - 1)
        return [await self._ask(body) for body in warm]

    async def send(self) -> None:
        """Send the whole load and wait for its answers. When cancelled, `run` keeps the finished ones."""
        settings, run = self._settings, self.run
        load = bodies(settings, self._model, settings.num_prompts, self._seed)
        places = asyncio.Semaphore(settings.max_concurrency or len(load))
        run.started = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for body, due in zip(load, arrivals(settings, self._seed), strict=True):
                    await asyncio.sleep(max(0.0, run.started + due - time.monotonic()))
                    await places.acquire()
                    if settings.request_rate:
                        run.late.append(time.monotonic() - run.started - due)
                    group.create_task(self._count(body, places))
        finally:
            run.ended = time.monotonic()
            for connection in self._idle:
                connection.close()

    async def _count(self, body: bytes, places: asyncio.Semaphore) -> None:
        self.run.in_flight += 1
        self.run.peak = max(self.run.peak, self.run.in_flight)
        try:
            sample = await self._ask(body)
            self.run.samples.append(sample)
            self._on_ended(self.run, sample)
        finally:
            self.run.in_flight -= 1
            places.release()

    async def _ask(self, body: bytes) -> Sample:
        sample = Sample(arrived=time.monotonic())
        connection = None
        whole = False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                connection = self._idle.pop() if self._idle else await Connection.open(self._target)
                await connection.complete(body, sample)
            whole = True
        except TimeoutError:
            sample.error = f"timed out after {TIMEOUT_S:g} s"
        except ERRORS as error:
            sample.error = str(error) or type(error).__name__
        finally:
            if connection is not None:
                with contextlib.suppress(OSError):
                    self._idle.append(connection) if whole else connection.close()
        return sample
