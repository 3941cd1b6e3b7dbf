"""A tenant's limits through the death of a gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from gateway.tenants.budgets import LEASE_S
from tests.chaos.cluster import FAKE, ChaosCluster
from tests.integration.waiting import eventually

KEY = "a-key-of-a-tenant"
TENANTS = f'[tenants.acme]\nkeys = ["{KEY}"]\nmax_concurrent = 2\n'
FREE_WITHIN_S = LEASE_S + 60.0  # a busy machine
LONG = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}


@pytest.mark.long
async def test_a_tenant_of_a_killed_gateway_is_free_again_within_seconds(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    options = {"gateway_options": ("--tenants", str(tmp_path / "tenants.toml")), "gateways": 2, **FAKE}
    async with (
        ChaosCluster(
            tmp_path / "cluster", model=model, prefill=0, decode=0, both=1, fake_step_ms=300, **options
        ) as cluster,
        httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client,
    ):
        begun: asyncio.Queue[bytes] = asyncio.Queue()
        tasks = [asyncio.create_task(stream(client, cluster.urls["gateway"], begun)) for _ in range(2)]
        try:
            for _ in tasks:
                await begun.get()
            other = cluster.urls["gateway-1"]

            async def status() -> int:
                return (await client.post(f"{other}/v1/completions", json=SHORT)).status_code

            async def served() -> bool:
                return await status() == 200

            assert await status() == 429
            await cluster.crash("gateway")
            assert await status() == 429
            await cluster.again("gateway")  # under the same name: it is another one, and has nothing to give back
            await eventually(served, FREE_WITHIN_S)
        finally:
            for task in tasks:
                task.cancel()


async def stream(client: httpx.AsyncClient, url: str, begun: asyncio.Queue[bytes]) -> None:
    async with client.stream("POST", f"{url}/v1/completions", json=LONG) as answer:
        parts = answer.aiter_bytes()
        begun.put_nowait(await anext(parts))
        async for _ in parts:
            pass
