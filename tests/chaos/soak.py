"""Mixed traffic with cancels for a while: what a process keeps must not grow with the number of requests."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

import redis.asyncio

from tests.chaos.asks import Oracle
from tests.chaos.cluster import ChaosCluster
from tests.chaos.kills import Verdict, judge
from tests.chaos.load import Load
from tests.chaos.overload import memory_mb


@dataclass(slots=True, kw_only=True)
class Holdings:
    """What an idle cluster has: resident MiB and open descriptors of all processes, keys in Redis that name a request."""

    memory_mb: float
    descriptors: int
    request_keys: int


async def holdings(cluster: ChaosCluster) -> Holdings:
    """Look once; the cluster should be idle."""
    count = 0
    for pid in cluster.pids.values():
        with contextlib.suppress(OSError):
            count += len(os.listdir(f"/proc/{pid}/fd"))
    async with redis.asyncio.Redis.from_url(cluster.redis.url) as store:
        keys = [key async for key in store.scan_iter("baton:placed:*")]
    return Holdings(memory_mb=memory_mb(cluster), descriptors=count, request_keys=len(keys))


async def soak(
    cluster: ChaosCluster, oracle: Oracle, *, streams: int, seconds: float, first: int
) -> tuple[Verdict, Holdings, Holdings]:
    """Load for a fifth of the time to warm up, then for the rest; the verdict, and what was held when idle before and after."""
    await _load(cluster, oracle, streams=streams, seconds=seconds / 5, first=first)
    await cluster.until_idle()
    before = await holdings(cluster)
    outcomes = await _load(cluster, oracle, streams=streams, seconds=seconds * 4 / 5, first=first + 100_000)
    verdict = judge("soak", outcomes, oracle, held=await cluster.until_idle(), began=0.0)
    return verdict, before, await holdings(cluster)


async def _load(cluster: ChaosCluster, oracle: Oracle, *, streams: int, seconds: float, first: int):  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    async with Load(cluster.url, oracle, streams=streams, first=first) as load:
        while time.monotonic() < end:
            await load.until_answered(streams)
        return await load.stop()
