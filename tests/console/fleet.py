"""A Baton whose console is tested, and what tests ask of it over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from services.runtime.servers import stop
from tests.e2e.cluster import ROOT, Cluster
from tests.models import build_tiny_model
from tests.ports import own_port

ADMIN_KEY = "an-admin-key-of-a-test"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


@contextlib.asynccontextmanager
async def console_cluster(folder: Path) -> AsyncIterator[Cluster]:
    """A prefill worker, a decode worker and one of both roles, with the fake device and an admin key."""
    model = build_tiny_model(folder / "tiny", "llama")
    options = {"prefill": 1, "decode": 1, "both": 1, "fake": True, "kv_memory_mb": 8, "fake_step_ms": 2}
    keys = ("--admin-key", ADMIN_KEY)
    async with Cluster(folder / "run", model=model, gateway_options=keys, **options) as running:  # type: ignore[arg-type]
        yield running


async def until_state(http: httpx.AsyncClient, holds: Any) -> dict[str, Any]:
    """The first state for which `holds(state)`; what it waits for is told by heartbeats."""
    state: dict[str, Any] = {}
    try:
        async with asyncio.timeout(60):
            while True:
                state = (await http.get("/console/state")).json()
                if holds(state):
                    return state
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not so within a minute: {state}") from None


@contextlib.asynccontextmanager
async def one_pair(http: httpx.AsyncClient, *others: httpx.AsyncClient) -> AsyncIterator[None]:
    """So that it is known who hands over to whom, to the `others` among the gateways, too."""
    for draining, wanted in ((True, "draining"), (False, "ready")):
        told = await http.post("/admin/workers/worker-0/drain", json={"draining": draining})
        assert told.status_code == 200
        for gateway in (http, *others):
            await until_state(gateway, lambda state, wanted=wanted: status(state).get("worker-0") == wanted)
        if draining:
            yield


def roles(state: dict[str, Any]) -> dict[str, list[str]]:
    return {worker["id"]: worker["roles"] for worker in state["workers"]}


def status(state: dict[str, Any]) -> dict[str, str]:
    return {worker["id"]: worker["status"] for worker in state["workers"]}


def generated(state: dict[str, Any]) -> dict[str, int]:
    return {worker["id"]: worker["generated_tokens"] for worker in state["workers"]}


async def complete(http: httpx.AsyncClient, *, first: int, tokens: int) -> dict[str, Any]:
    """A prompt of 40 tokens that begins with `first`, answered with so many."""
    body = {"model": "tiny", "prompt": list(range(first, first + 40)), "max_tokens": tokens, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def until_event(lines: AsyncIterator[str], name: str, holds: Any) -> dict[str, Any]:
    """The first `name` of a stream for which `holds(value)`."""
    said = ""
    async with asyncio.timeout(60):
        async for line in lines:
            kind, _, rest = line.partition(": ")
            if kind == "event":
                said = rest
            if kind == "data" and said == name and holds(value := json.loads(rest)):
                return value  # type: ignore[no-any-return]
    raise AssertionError(f"the stream ended without such {name}")


@contextlib.asynccontextmanager
async def second_gateway(cluster: Cluster) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Beside the cluster's own, with the admin's user of NATS and Redis."""
    port = own_port()
    options = [
        "--nats-url",
        cluster.nats.url,
        "--redis-url",
        cluster.redis.url,
        "--port",
        str(port),
        "--gateway-id",
        "second",
    ]
    options += ["--model", str(cluster.folder.parent / "tiny"), "--served-model-name", "tiny", "--admin-key", ADMIN_KEY]
    command = [sys.executable, "-m", "services.gateway", *options, "--local-prefill-tokens", "0"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
        yield process, url
    finally:
        await stop(process, timeout_s=10)
