"""What an idle cluster holds: memory, descriptors and threads of processes, subscriptions, keys, blocks; and whether it grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import redis.asyncio

from common.messages import WorkerState
from tests.chaos.cluster import ChaosCluster

LOOKS, BETWEEN_LOOKS_S = 5, 0.3  # the least of several: a heartbeat's request or a client's last socket is no holding
LAST_PART = 0.75  # of a run: what comes before it may fill caches

Holdings = dict[str, float]


async def holdings(cluster: ChaosCluster) -> Holdings:
    """What `cluster`, which should be idle, holds, by name: memory in MiB, the rest are counts."""
    looks = []
    for number in range(LOOKS):
        await asyncio.sleep(BETWEEN_LOOKS_S if number else 0)
        looks.append(await _look(cluster))
    names = dict.fromkeys(name for look in looks for name in look)
    return {name: min(look.get(name, 0.0) for look in looks) for name in names}


def growth(samples: Sequence[tuple[float, Holdings]], name: str, seconds: float) -> float:
    """By how much `name` grows in `seconds`: the slope, by least squares, of the last three quarters of `samples`.

    A sample is an instant in seconds and what was held then. 0 for fewer than two of them.
    """
    begin = samples[-1][0] - LAST_PART * (samples[-1][0] - samples[0][0]) if samples else 0.0
    late = [(instant, held.get(name, 0.0)) for instant, held in samples if instant >= begin]
    if len(late) < 2:
        return 0.0
    return seconds * statistics.linear_regression(*zip(*late, strict=True)).slope


async def _look(cluster: ChaosCluster) -> Holdings:
    found: Holdings = {}
    for name, pid in cluster.pids.items():
        with contextlib.suppress(OSError):  # it ended: the count of its descriptors shows it
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found[f"memory of {name}"] = int(status["RssAnon"].split()[0]) / 1024
            found[f"threads of {name}"] = int(status["Threads"])
            found[f"descriptors of {name}"] = len(os.listdir(f"/proc/{pid}/fd"))
    return found | await _in_nats(cluster) | await _in_redis(cluster) | _blocks(cluster)


async def _in_nats(cluster: ChaosCluster) -> Holdings:
    """Of the server's monitoring: subscriptions and connections of all clients, and what waits in the streams."""
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{cluster.nats_monitor}", timeout=10, verify=False
    ) as client:
        connections = (await client.get("/connz", params={"subs": 1})).json()["connections"]
        jetstream = (await client.get("/jsz", params={"streams": 1})).json()
    streams = [stream for account in jetstream["account_details"] for stream in account["stream_detail"]]
    return {
        "subscriptions in NATS": sum(one["subscriptions"] for one in connections),
        "connections to NATS": len(connections),
        "consumers in NATS": jetstream["consumers"],
    } | {f"messages in {stream['name']}": stream["state"]["messages"] for stream in streams}


async def _in_redis(cluster: ChaosCluster) -> Holdings:
    """Keys by what they are for. The prefix index may have as many as the workers' pools have blocks."""
    async with redis.asyncio.Redis.from_url(cluster.redis.url) as store:
        keys = [key.decode(errors="replace") async for key in store.scan_iter(count=10_000)]
        clients = await store.info("clients")
    kinds = Counter(":".join(key.split(":")[:2]) for key in keys)
    index = kinds.pop("baton:block", 0)
    return {f"keys {kind} in Redis": float(count) for kind, count in sorted(kinds.items())} | {
        "connections to Redis": float(clients["connected_clients"]),
        "keys of blocks in Redis, beyond the pools": float(max(0, index - sum(map(_blocks_of, _states(cluster))))),
    }


def _blocks(cluster: ChaosCluster) -> Holdings:
    states = _states(cluster)
    missing = sum(_blocks_of(state) - state.free_blocks for state in states)
    return {"blocks held": missing, "workers heard": len(states)}


def _states(cluster: ChaosCluster) -> list[WorkerState]:
    return [state for state in cluster.peers.states.values() if state.worker in cluster.names]


def _blocks_of(state: WorkerState) -> int:
    return state.region.layout.num_blocks
