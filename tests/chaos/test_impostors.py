"""Each credential speaks as another one, with every message on every subject: it is counted, and nothing moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.impostor import client_of, gatebeats, heartbeats, requests_to, say, words
from tests.integration.waiting import eventually

STREAMS = 6
MOVED = tuple(f'baton_gateway_events_total{{event="{event}"}}' for event in ("retries", "resends", "workers_lost"))
IMPOSTORS = ("decode-1", "prefill-0", "gateway-1", "planner", "observer")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("impostors")
    options = {"prefill": 1, "decode": 2, "gateways": 2, **FAKE, "fake_step_ms": 20}
    async with ChaosCluster(folder, model=model, **options) as cluster:
        yield cluster


async def counted(cluster: ChaosCluster, name: str) -> float:
    """A counter's sum over all labels, at the first gateway."""
    return sum(value for key, value in (await cluster.metrics()).items() if key.startswith(name))


async def running(cluster: ChaosCluster) -> list[str]:
    """Ids of the first gateway's requests, once all of them are decoded."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, verify=False) as client:
        told = (await client.get("/debug/requests")).raise_for_status().json()
    ids = [one["request_id"] for one in told["running"]]
    decoded = sum(state.running for state in cluster.peers.states.values() if "decode" in state.roles)
    return ids if len(ids) == decoded == STREAMS else []


async def all_counted(cluster: ChaosCluster) -> bool:
    """True once each worker's heartbeat has told that it heard somebody speak as another."""
    return all(state.totals.forged for state in cluster.peers.states.values())


async def answer(cluster: ChaosCluster, number: int, max_tokens: int = 250) -> str:
    """A long answer."""
    body = {"model": "tiny", "prompt": [5 + number] * 40, "max_tokens": max_tokens, "ignore_eos": True, "seed": number}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, verify=False) as client:
        told = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    assert told["usage"]["completion_tokens"] == max_tokens
    return str(told["choices"][0]["text"])


@pytest.mark.parametrize("impostor", IMPOSTORS)
async def test_nothing_moves_when_a_credential_speaks_as_others(cluster: ChaosCluster, impostor: str) -> None:
    honest = await asyncio.gather(*(answer(cluster, number) for number in range(STREAMS)))
    before = [await counted(cluster, name) for name in MOVED]
    streams = [asyncio.create_task(answer(cluster, number)) for number in range(STREAMS)]
    ids = await eventually(lambda: running(cluster))
    states = cluster.peers.states
    async with client_of(cluster, impostor) as client:
        for victim in (states[name] for name in ("decode-0", "decode-1", "prefill-0") if name != impostor):
            await say(client, list(heartbeats(victim, impostor)))
            await say(client, list(words(victim, impostor, "gateway", ids)))
            other = states["prefill-0" if victim.worker != "prefill-0" else "decode-0"]
            if other.worker != impostor:
                may_order = impostor in ("gateway-1", "planner")
                await say(client, list(requests_to(victim, other, impostor, ids, may_order=may_order)))
        await say(client, list(gatebeats("gateway", impostor)))
    assert await asyncio.gather(*streams) == honest
    assert [await counted(cluster, name) for name in MOVED] == before
    assert await cluster.until_idle() == []
    if impostor != "observer":
        await eventually(lambda: all_counted(cluster))
