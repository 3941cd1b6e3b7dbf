"""Requests to a cluster of fake devices, the answers that are right, and a look at its workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from common.bus import NatsBus, NatsSettings, connect_bus
from common.messages import SamplingParams, WorkerState
from common.peers import Peers
from engine.config import CacheConfig, EngineConfig
from engine.fake.engine import FakeEngine
from tests.e2e.cluster import Cluster

FAKE = {"fake": True, "kv_memory_mb": 8, "fake_step_ms": 5}
TOKENS = 24


def oracle(model: Path) -> FakeEngine:
    """The fake device that the workers run, to ask what the answer must be."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    return FakeEngine(EngineConfig(model=model, cache=CacheConfig(kv_memory_bytes=8 << 20)), vocab_size=vocab_size)


def expected(model: Path, prompt: list[int], count: int = TOKENS, **sampling: object) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, **sampling)  # type: ignore[arg-type]
    return oracle(model).expected(prompt, count, params)


@contextlib.asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, verify=False) as client:
        yield client


async def complete(client: httpx.AsyncClient, prompt: list[int], **options: object) -> dict[str, object]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body | {"return_token_ids": True} | options)
    assert response.status_code == 200, response.text
    answer = response.json()
    return {"tokens": answer["choices"][0]["token_ids"], "usage": answer["usage"]}


@contextlib.asynccontextmanager
async def watching(cluster: Cluster) -> AsyncIterator[tuple[NatsBus, Peers]]:
    """A bystander on the bus that hears the workers' heartbeats."""
    async with connect_bus(NatsSettings(url=cluster.nats.url), name="bystander") as bus:
        peers = Peers()
        await peers.start(bus)
        yield bus, peers
        await peers.close()


async def until(peers: Peers, holds, timeout_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    """Wait until `holds(states)`, looking at each heartbeat period."""
    async with asyncio.timeout(timeout_s):
        while not holds(list(peers.states.values())):
            await asyncio.sleep(0.05)


def all_idle(states: list[WorkerState]) -> bool:
    """Nothing runs, waits or is held, and every block can be had."""
    return bool(states) and all(
        state.running == state.waiting == state.held_blocks == 0 and state.free_blocks == state.region.layout.num_blocks
        for state in states
    )
