"""A worker's own credentials say of it what can't be, or little: that costs its place, and nobody else's requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from common import subjects
from common.messages import WorkerState
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.chaos.impostor import client_of, say
from tests.integration.waiting import eventually

LIAR = "decode-1"
ABSURD = [
    {"max_model_len": 0},
    {"max_model_len": -5},
    {"max_model_len": 1},
    {"model_fingerprint": ""},
    {"vocab_size": 0},
    {"free_blocks": 10**9},
    {"decode_step_ms": float("nan")},
    {"prefill_tokens_per_s": float("inf")},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    folder = tmp_path_factory.mktemp("heartbeats")
    async with ChaosCluster(folder, model=model, prefill=1, decode=2, **FAKE) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def honest(cluster: ChaosCluster) -> WorkerState:
    """Messages of the liar while it lived."""
    state = (await eventually(lambda: _all_heard(cluster)))[LIAR]
    await cluster.crash(LIAR)
    return state


async def _all_heard(cluster: ChaosCluster) -> dict[str, WorkerState]:
    states = cluster.peers.states
    return states if len(states) == 3 else {}


@contextlib.asynccontextmanager
async def beating(cluster: ChaosCluster, state: WorkerState) -> AsyncIterator[None]:
    async with client_of(cluster, LIAR) as client:

        async def beat() -> None:
            while True:
                await say(client, [(subjects.heartbeat(LIAR), state)])
                await asyncio.sleep(0.2)

        life = asyncio.create_task(beat())
        try:
            yield
        finally:
            life.cancel()


async def ready(cluster: ChaosCluster) -> int:
    """Decode workers that get work."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        return int((await client.get("/ready")).json()["workers"]["decode"])


async def ask(cluster: ChaosCluster, **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": [5] * 100, "ignore_eos": True} | options
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["usage"])


@pytest.mark.parametrize("wrong", ABSURD, ids=str)
async def test_a_heartbeat_that_can_t_be_costs_its_worker_the_place(
    cluster: ChaosCluster, honest: WorkerState, wrong: dict[str, Any]
) -> None:
    log = cluster.folder / "gateway.log"
    before = log.read_text().count("bus.malformed")
    async with beating(cluster, msgspec.structs.replace(honest, **wrong)):
        async with asyncio.timeout(60):
            while log.read_text().count("bus.malformed") == before or await ready(cluster) != 1:
                await asyncio.sleep(0.05)
        assert (await ask(cluster, max_tokens=20))["completion_tokens"] == 20


async def test_a_short_context_gets_short_requests_alone(cluster: ChaosCluster, honest: WorkerState) -> None:
    """Nobody lives under the name: a request that went there would come late, as another attempt."""
    async with beating(cluster, msgspec.structs.replace(honest, max_model_len=honest.region.layout.block_size)):
        async with asyncio.timeout(60):
            while await ready(cluster) != 2:
                await asyncio.sleep(0.05)
        for _ in range(5):
            assert (await ask(cluster, max_tokens=20))["completion_tokens"] == 20
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            [card] = (await client.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == honest.max_model_len
        rest = await ask(cluster)
        assert rest["completion_tokens"] == honest.max_model_len - rest["prompt_tokens"]
    assert (await cluster.metrics()).get('baton_gateway_events_total{event="retries"}', 0) == 0
