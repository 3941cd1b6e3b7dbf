"""Broken devices, drains and restarts: scenarios in which no client may lose anything."""

from __future__ import annotations

import asyncio
import re
import time

from tests.chaos.asks import Oracle, ask
from tests.chaos.cluster import ChaosCluster, FaultDidNotHappenError
from tests.chaos.kills import Verdict, judge
from tests.chaos.load import Load
from tests.chaos.poison import Supervisor, poisoned, send
from worker.worker import EXIT_DEVICE_BROKEN

STRIKES = {"hang": 507, "fail": 508, "oom": 509, "hang-decoding": 503, "fail-decoding": 504}
FAULTY = ",".join(f"{kind}:{token}" for kind, token in STRIKES.items())
DEADLINE_S = 120.0
LONG_ANSWER, MOVES = 1_600, 5  # tokens; more than the attempts that a request has
MOST_TRIES = 100  # until placement chose the worker with the faulty device; 1 to 26 were needed: short ones go where nobody waits


async def device_trouble(cluster: ChaosCluster, oracle: Oracle, kind: str, *, streams: int, first: int) -> Verdict:
    """One worker's device fails while it serves: it leaves (out of memory: it stays); its requests are answered elsewhere."""
    load = Load(cluster.url, oracle, streams=streams, first=first, deadline_s=DEADLINE_S)
    async with Supervisor(cluster) as supervisor, load:
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
    cluster: ChaosCluster, oracle: Oracle, names: list[str], *, streams: int, first: int, longest_answer: int = 70
) -> Verdict:
    """SIGTERM to each of the processes in turn, started again once it has drained; new requests go to the other gateways."""
    asking = {"first": first, "deadline_s": DEADLINE_S, "longest_answer": longest_answer}
    async with Load(cluster.balance, oracle, streams=streams, **asking) as load:  # type: ignore[arg-type]
        await load.until_answered(streams // 2)
        for name in names:
            await cluster.restart(name)
            await load.until_answered(streams // 2)
        outcomes = await load.stop()
    return judge("rolling restart", outcomes, oracle, held=await cluster.until_idle(), began=0.0)


async def outlives_its_workers(cluster: ChaosCluster, oracle: Oracle, *, first: int) -> Verdict:
    """One answer takes longer than any grace, and each worker that has it leaves: it moves on, as often as that takes."""
    asked = ask(12 * first, oracle, deadline_s=DEADLINE_S, longest_answer=LONG_ANSWER)
    began = time.monotonic()
    answering = asyncio.create_task(send(cluster, asked))
    for _ in range(MOVES):
        await cluster.restart(await cluster.busiest("decode"))
    outcome = await answering
    return judge("a stream that outlives its workers", [outcome], oracle, held=await cluster.until_idle(), began=began)


def moved(cluster: ChaosCluster) -> int:
    """How many requests were moved because a worker's grace was over."""
    logs = [cluster.folder / f"{name}.log" for name in cluster.names]
    return sum(
        int(count) for log in logs for count in re.findall(r"worker\.grace_over .*requests=(\d+)", log.read_text())
    )
