"""The intake of jobs: who is told to end ends, whatever the client of NATS makes of it."""

from __future__ import annotations

import asyncio

import pytest

from common.bus import Delivery
from tests.fakes.bus import MemoryBus
from worker.identity import Identity
from worker.serving.jobs import ClaimedJob, JobIntake


class Deaf(MemoryBus):
    """A bus whose pulls swallow a cancellation, as Python 3.11's `wait_for` does where a message comes in the same turn."""

    pulling = asyncio.Event()

    async def jobs(self, worker: str) -> Deaf:
        return self

    async def fetch(self, max_jobs: int, *, expires_s: float = 1.0) -> list[Delivery]:
        self.pulling.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return []
        raise AssertionError


async def test_a_swallowed_cancellation_ends_it_all_the_same() -> None:
    """A process that had lost its name to an older one served on under it for ever, and both were contested."""

    async def start(claimed: ClaimedJob) -> None:
        raise AssertionError(claimed)

    bus = Deaf()
    intake = JobIntake(bus=bus, identity=Identity("w", 1))
    running = asyncio.create_task(intake.run(asyncio.Event(), room=lambda: 1, start=start))
    await bus.pulling.wait()
    running.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await running
