"""Overload of a whole Baton with the fake device: who waits, who goes first, and who is sent away."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.e2e.cluster import Cluster
from tests.models import build_tiny_model

KEYS = {"heavy": "the-key-of-the-heavy", "light": "the-key-of-the-light", "other": "the-key-of-another"}
WEIGHTS = {"heavy": 3, "light": 1, "other": 1}
PROMPT = 100  # tokens
ADMIN = "the-admin-s-own-key"
LIMIT = 4000  # prompt tokens that may wait


FILE = "".join(f'[tenants.{name}]\nkeys = ["{key}"]\nweight = {WEIGHTS[name]}\n' for name, key in KEYS.items())


class Served(NamedTuple):
    cluster: Cluster
    client: httpx.AsyncClient
    tenants: Path


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A cluster that computes 500 prompt tokens a second, and knows it."""
    folder = tmp_path_factory.mktemp("admission")
    tenants = folder / "tenants.toml"
    tenants.write_text(FILE)
    options = ("--tenants", str(tenants), "--admin-key", ADMIN, "--window-s", "0.2", "--max-queued-tokens", str(LIMIT))
    options += ("--admit-by", "goal")
    model = build_tiny_model(folder / "tiny", "llama")
    cluster = Cluster(
        folder / "cluster", model=model, fake=True, fake_step_ms=1, fake_token_us=2000, gateway_options=options
    )
    limits = httpx.Limits(max_connections=200)
    async with cluster, httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits) as client:
        for _ in range(3):
            assert (await ask(client, "other")).status_code == 200
        yield Served(cluster, client, tenants)


@pytest.fixture
def client(served: Served) -> httpx.AsyncClient:
    return served.client


_numbers = iter(range(2, 10**9))


async def ask(client: httpx.AsyncClient, tenant: str, **options: object) -> httpx.Response:
    """One request whose prompt nobody had before."""
    number = next(_numbers)
    body = {"model": "tiny", "prompt": [number % 400 + 1, number // 400 % 400 + 1] * (PROMPT // 2)}
    body |= {"max_tokens": 1, "ignore_eos": True} | options
    return await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEYS[tenant]}"})


async def figure(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics", headers={"authorization": f"Bearer {ADMIN}"})).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def test_two_tenants_that_wait_share_by_weight(client: httpx.AsyncClient) -> None:
    ended: list[str] = []

    async def asked(tenant: str) -> None:
        assert (await ask(client, tenant)).status_code == 200
        ended.append(tenant)

    tasks: list[asyncio.Task[None]] = []
    async with asyncio.timeout(150):
        while await figure(client, "vllm:num_requests_waiting") < 24:  # on a busy machine the first are through by then
            if all(task.done() for task in tasks):
                ended.clear()
                tasks = [asyncio.create_task(asked(tenant)) for tenant in ("light",) * 16 + ("heavy",) * 16]
            await asyncio.sleep(0.02)
        present = len(ended)
        await asyncio.gather(*tasks)
    first = Counter(ended[present + 4 : present + 16])  # after those that had started: while both wait
    assert first["heavy"] >= 7, ended  # of 12: 9 by weight, two in the window
    assert await figure(client, "baton_tenant_tokens_total") >= 32 * (PROMPT + 1)


async def test_beyond_capacity_everybody_is_told_at_once_and_who_is_admitted_is_served(
    client: httpx.AsyncClient,
) -> None:
    answers: list[int] = []
    refused_at: list[float] = []

    async def asked(index: int) -> httpx.Response:
        response = await ask(client, list(KEYS)[index % 3])
        answers.append(response.status_code)
        if response.status_code == 429:
            refused_at.append(time.monotonic())
        return response

    began = time.monotonic()
    responses = await asyncio.gather(*(asked(index) for index in range(80)))  # of 8,000 tokens
    statuses = Counter(response.status_code for response in responses)
    assert statuses.keys() == {200, 429}
    # 4000 tokens wait at most, 400 of them only for priority; five prompts a second are computed meanwhile.
    assert 30 <= statuses[200] <= 45 + 5 * (refused_at[-1] - began)
    assert set(answers[-10:]) == {200}  # the refusals came first
    for response in responses:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "overloaded"
    assert await figure(client, "baton_refusals_total") == statuses[429]
    assert await figure(client, "vllm:num_requests_waiting") == 0


async def test_who_is_more_important_goes_first(client: httpx.AsyncClient) -> None:
    ended: list[int] = []

    async def asked(priority: int) -> None:
        assert (await ask(client, "other", priority=priority)).status_code == 200
        ended.append(priority)

    low = [asyncio.create_task(asked(-1)) for _ in range(16)]
    async with asyncio.timeout(60):
        while (
            await figure(client, 'baton_waiting_requests{model_name="tiny",tier="low"}') < 8
        ):  # more than a second's work
            await asyncio.sleep(0.02)
        told = await client.get("/debug/requests", headers={"authorization": f"Bearer {ADMIN}"})
        (*_, last) = [entry for entry in told.json()["waiting"] if entry["status"] == "waiting"]
        detail = await client.get(f"/debug/requests/{last['request_id']}", headers={"authorization": f"Bearer {ADMIN}"})
        assert detail.json()["requests"][0]["tenant"] == last["tenant"]
        await asyncio.gather(asked(0), asked(0))
        assert ended.count(-1) < 16  # they overtook those that waited
        await asyncio.gather(*low)


async def test_who_has_a_goal_that_can_t_be_met_is_refused_and_who_has_none_is_served(
    client: httpx.AsyncClient,
) -> None:
    others = [asyncio.create_task(ask(client, "other")) for _ in range(16)]  # three seconds
    async with asyncio.timeout(60):
        while await figure(client, "vllm:num_requests_waiting") < 8:
            await asyncio.sleep(0.02)
        refused = await ask(client, "other", ttft_slo_ms=1)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (429, "overloaded", "ttft_slo_ms")
    assert int(refused.headers["retry-after"]) >= 1
    assert await figure(client, 'baton_refusals_total{model_name="tiny",reason="goal"}') == 1
    assert {response.status_code for response in await asyncio.gather(*others)} == {200}


async def test_keys_are_changed_under_way_and_nobody_is_dropped(served: Served) -> None:
    client, gateway = served.client, served.cluster.processes["gateway"]
    new = "the-next-key-of-another"
    body = {"model": "tiny", "prompt": [7] * 20, "max_tokens": 400, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True}
    old_headers, headers = ({"authorization": f"Bearer {key}"} for key in (KEYS["other"], new))
    async with client.stream("POST", "/v1/completions", json=body, headers=old_headers) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: {")
        served.tenants.write_text(FILE.replace(KEYS["other"], new))
        gateway.send_signal(signal.SIGHUP)
        async with asyncio.timeout(60):
            while (await client.get("/v1/models", headers=headers)).status_code != 200:
                await asyncio.sleep(0.02)
        assert (await client.get("/v1/models", headers=old_headers)).status_code == 401
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    served.tenants.write_text("[tenants.other]\nwieght = 1\n")
    gateway.send_signal(signal.SIGHUP)
    log = served.cluster.folder / "gateway.log"
    async with asyncio.timeout(60):
        while "tenants.not_reloaded" not in log.read_text():
            await asyncio.sleep(0.02)
    assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert not any(key in log.read_text() for key in (*KEYS.values(), new, ADMIN))
