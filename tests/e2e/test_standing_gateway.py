"""A gateway under `baton up` that stands still is named, ended and started again; requests go on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.stack import PATIENCE_S, Up, up
from tests.models import build_tiny_model
from tests.ports import own_port


async def ask(url: str) -> int:
    """A new connection; 0: it was cut."""
    with contextlib.suppress(httpx.TransportError):
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 4}
            return (await client.post(f"{url}/v1/completions", json=body)).status_code
    return 0


def gateways(up: Up) -> list[int]:
    return [child.pid for child in up.children("services.gateway")]


async def test_a_stopped_gateway_of_three_is_replaced_and_requests_go_on(tmp_path: Path) -> None:
    model, own = build_tiny_model(tmp_path / "tiny", "llama"), own_port(run=3)
    async with up(model, tmp_path / "data", "--device", "fake", "--gateways", "3", "--own-port", str(own)) as stack:
        await stack.says("Baton serves")
        before = gateways(stack)
        stopped = stack.child("services.gateway")
        stopped.send_signal(signal.SIGSTOP)
        meanwhile = [asyncio.create_task(ask(stack.url)) for _ in range(30)]
        named = await stack.says("is stopped, for")
        assert named.startswith("gateway-")
        await stack.says("restarting gateway-")
        outcomes = await asyncio.gather(*meanwhile)
        assert set(outcomes) <= {0, 200}, outcomes
        assert outcomes.count(200) >= 10, outcomes
        assert await asyncio.gather(*(ask(stack.url) for _ in range(20))) == [200] * 20
        async with asyncio.timeout(PATIENCE_S):
            for port in (own, own + 1, own + 2):
                while await ask(f"http://127.0.0.1:{port}") != 200:
                    await asyncio.sleep(0.05)
        after = gateways(stack)
        assert len(after) == 3
        assert len(set(after) & set(before)) == 2


@pytest.mark.long
async def test_the_only_gateway_is_replaced_too(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny", "llama")
    async with up(model, tmp_path / "data", "--device", "fake") as stack:
        await stack.says("Baton serves")
        stack.child("services.gateway").send_signal(signal.SIGSTOP)
        await stack.says("gateway is stopped, for")
        await stack.says("restarting gateway")
        async with asyncio.timeout(PATIENCE_S):
            while await ask(stack.url) != 200:
                await asyncio.sleep(0.05)
