"""Broken devices, drains and restarts: scenarios in which no client may lose anything."""

from __future__ import annotations

import asyncio
import signal

from tests.chaos.asks import Oracle
from tests.chaos.cluster import ChaosCluster, FaultDidNotHappenError
from tests.chaos.kills import Verdict, judge
from tests.chaos.load import Load
from tests.chaos.poison import Supervisor, poisoned, send
from worker.host import EXIT_DEVICE_BROKEN

STRIKES = {"hang": 507, "fail": 508, "oom": 509, "hang-decoding": 503, "fail-decoding": 504}
FAULTY = ",".join(f"{kind}:{token}" for kind, token in STRIKES.items())
MOST_TRIES = 12  # until placement chose the worker with the faulty device


async def device_trouble(cluster: ChaosCluster, oracle: Oracle, kind: str, *, streams: int, first: int) -> Verdict:
    """One worker's device fails while it serves: it leaves (out of memory: it stays); its requests are answered elsewhere."""
    async with Supervisor(cluster) as supervisor, Load(cluster.url, oracle, streams=streams, first=first) as load:
        await load.until_answered(streams)
        struck = []
        for number in range(MOST_TRIES):
            struck.append(await send(cluster, poisoned(number + 1, oracle, STRIKES[kind])))
            if supervisor.deaths or (kind == "oom" and "OutOfMemoryError" in cluster.logs(200)):
                break
        else:
            raise FaultDidNotHappenError(f"no device struck by {kind}")
        await load.until_answered(streams)
        outcomes = await load.stop()
    expected = [] if kind == "oom" else [EXIT_DEVICE_BROKEN]
    if [code for _, code in supervisor.deaths] != expected:
        raise AssertionError(f"workers ended with {supervisor.deaths}, not {expected}")
    await cluster.until_ready()
    return judge(kind, outcomes + struck, oracle, held=await cluster.until_idle(), began=0.0)


async def rolling_restart(
    cluster: ChaosCluster, oracle: Oracle, names: list[str], *, streams: int, first: int
) -> Verdict:
    """SIGTERM to each of the workers in turn, started again once it has drained."""
    async with Load(cluster.url, oracle, streams=streams, first=first) as load:
        await load.until_answered(streams)
        for name in names:
            process = cluster.processes[name]
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                code = await process.wait()
            if code != 0:
                raise AssertionError(f"{name} did not drain: exit code {code}\n{cluster.logs()}")
            await cluster.again(name)
            await load.until_answered(streams // 2)
        outcomes = await load.stop()
    return judge("rolling restart", outcomes, oracle, held=await cluster.until_idle(), began=0.0)
