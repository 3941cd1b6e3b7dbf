"""A host that is killed under load: while it loads a model, and while it starts a worker that the planner counts."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from common.words import HostStatus
from tests.chaos import checks
from tests.chaos.asks import Oracle
from tests.chaos.cluster import IDLE_WITHIN_S, FaultDidNotHappenError
from tests.chaos.kills import Verdict, judge
from tests.chaos.load import Load
from tests.e2e.hosting import OWN, PATIENCE_S, SPARE, Followed, followed

STREAMS = 24
DEADLINE_S = 90.0  # of requests that wait for a model to be loaded, on cores that others have
LOOK_S = 0.01
HostFault = Callable[[Followed], Awaitable[str]]


async def crash_loading(running: Followed) -> str:
    """kill -9 while it loads its model."""
    await _until(lambda: running.said.status is HostStatus.LOADING)
    await _crash(running)
    return "kill -9 host, which loads"


async def crash_scaling(running: Followed) -> str:
    """kill -9 while a worker starts that the planner counts."""
    await _until(lambda: SPARE in running.said.workers)
    await _crash(running)
    return "kill -9 host, which starts a worker"


FAULTS = (crash_loading, crash_scaling)


async def under_load(folder: Path, model: Path, oracle: Oracle, fault: HostFault, *, tail: int = 40) -> Verdict:
    """Let the fault happen to a host under load, start it again, answer `tail` more, end the load, and judge."""
    async with followed(folder, model, step_ms=30, pause_s=60) as running:
        async with Load(running.site.url, oracle, streams=STREAMS, deadline_s=DEADLINE_S) as load:
            name, began = await fault(running), time.monotonic()
            await running.start_host()
            await load.until_answered(tail)
            await _until(lambda: {OWN, SPARE} <= running.said.workers.keys())  # it follows the count again
            outcomes = await load.stop()
        return judge(name, outcomes, oracle, held=await _held(running), began=began)


async def _crash(running: Followed) -> None:
    process = running.site.processes["h"]
    process.kill()
    if await process.wait() != -signal.SIGKILL:
        raise FaultDidNotHappenError(f"the host ended with {process.returncode} before it was killed")


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(LOOK_S)


async def _held(running: Followed) -> list[str]:
    """KV blocks and states that workers still hold some time after the load."""
    give_up_at = time.monotonic() + IDLE_WITHIN_S
    while True:
        left = checks.held(list(running.peers.states.values()), [OWN])
        if not left or time.monotonic() > give_up_at:
            return left
        await asyncio.sleep(LOOK_S)
