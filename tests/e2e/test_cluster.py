"""Answers of several workers: placement by prefix, roles, deadlines, a pool that is too small.

The workers run the fake device: real gateway, bus, scheduler, handoff and bytes; answers are right only if every byte is.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
import redis.asyncio

from common.messages import SamplingParams
from engine.config import CacheConfig, EngineConfig
from engine.fake.engine import FakeEngine
from tests.e2e.asking import FAKE, all_idle, client_of, complete, expected, until, watching
from tests.e2e.cluster import Cluster


@pytest.mark.long
@pytest.mark.parametrize(("transport", "pairs"), [("shm", 4), pytest.param("ucx", 2, marks=pytest.mark.long)])
async def test_many_workers_answer_a_burst_and_hold_nothing_afterwards(
    transport: str, pairs: int, model: Path, tmp_path: Path
) -> None:
    prompts = [[(7 * index + position) % 500 for position in range(1 + 11 * index)] for index in range(32)]
    async with Cluster(tmp_path, model=model, prefill=pairs, decode=pairs, transport=transport, **FAKE) as cluster:
        async with client_of(cluster) as client, watching(cluster) as (_, peers):
            answers = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
            await until(peers, lambda states: len(states) == 2 * pairs and all_idle(states))
    assert [answer["tokens"] for answer in answers] == [expected(model, prompt) for prompt in prompts]


async def test_the_second_request_goes_where_the_prefix_is_also_after_redis_forgot(model: Path, tmp_path: Path) -> None:
    async with Cluster(tmp_path, model=model, prefill=2, decode=1, **FAKE) as cluster:
        async with client_of(cluster) as client:
            for round_ in range(2):
                for index in range(6):  # with two workers, chance alone would miss some
                    prompt = [100 * round_ + index * 3 + 1] * 64
                    await complete(client, prompt)
                    await announced(cluster, blocks=4 * (6 * round_ + index + 1))
                    second = await complete(client, [*prompt, 5, 6, 7])
                    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
                    assert second["tokens"] == expected(model, [*prompt, 5, 6, 7])
                async with redis.asyncio.Redis.from_url(cluster.redis.url) as store:
                    await store.flushall()  # the workers notice and announce everything again
                await announced(cluster, blocks=24 * (round_ + 1))


async def announced(cluster: Cluster, *, blocks: int) -> None:
    """Wait until the index knows so many blocks of prefill workers, and all workers."""
    async with asyncio.timeout(60), redis.asyncio.Redis.from_url(cluster.redis.url) as store:
        while True:
            found = await store.keys("baton:block:*")
            holders = [await store.smembers(key) for key in found]
            known = sum(any(one.startswith(b"prefill-") for one in held) for held in holders)
            if known >= blocks and len(await store.keys("baton:worker:*")) == len(cluster.names):
                return
            await asyncio.sleep(0.02)


async def test_without_a_prefill_worker_the_decode_worker_prefills(model: Path, tmp_path: Path) -> None:
    async with Cluster(tmp_path, model=model, prefill=0, decode=1, **FAKE) as cluster, client_of(cluster) as client:
        prompt = [8] * 70
        first, second = await complete(client, prompt), await complete(client, prompt)
    assert first["tokens"] == second["tokens"] == expected(model, prompt)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


async def test_an_idle_decode_worker_prefills_a_short_prompt_once_rates_are_measured(
    model: Path, tmp_path: Path
) -> None:
    options = ("--local-prefill-tokens", "-1")
    async with (
        Cluster(tmp_path, model=model, prefill=1, decode=1, gateway_options=options, **FAKE) as cluster,
        client_of(cluster) as client,
        asyncio.timeout(100),
    ):
        number, placed = 0, ""
        while 'reason="local: earlier"' not in placed:
            prompt = [number % 400 + 1] * (40 + number % 50)
            assert (await complete(client, prompt))["tokens"] == expected(model, prompt)
            placed = "\n".join(
                line
                for line in (await client.get("/metrics")).text.splitlines()
                if line.startswith("baton_placements_total")
            )
            number += 1
    assert 'reason="load"' in placed  # before anything was measured


async def waiting(client: httpx.AsyncClient) -> float:
    """How many requests wait in the gateway."""
    return await gauge(client, "vllm:num_requests_waiting{")


async def gauge(client: httpx.AsyncClient, name: str) -> float:
    """The largest value of a metric in the gateway."""
    lines = (await client.get("/metrics")).text.splitlines()
    return max((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), default=0.0)


async def test_who_can_t_be_served_in_time_is_told_at_once_when_to_come_back(model: Path, tmp_path: Path) -> None:
    slow = FAKE | {"fake_token_us": 2000.0}  # 500 tokens a second
    async with (
        Cluster(tmp_path, model=model, prefill=1, decode=1, **slow) as cluster,
        client_of(cluster) as client,
    ):
        await complete(client, [3] * 200)
        async with asyncio.timeout(60):
            while not await gauge(client, "baton_worker_prefill_tokens_per_second{"):  # the gateway's own knowledge
                await asyncio.sleep(0.05)
        prompts = [[index + 2] * 400 for index in range(9)]
        answers = [asyncio.create_task(complete(client, prompt)) for prompt in prompts]
        async with asyncio.timeout(60):
            while await waiting(client) < 3:
                await asyncio.sleep(0.05)
        body = {"model": "tiny", "prompt": [9] * 10, "max_tokens": 4, "timeout": 0.5}
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "deadline" in refused.json()["error"]["message"]
        assert [(await answer)["tokens"] for answer in answers] == [expected(model, prompt) for prompt in prompts]


@pytest.mark.long
async def test_a_prompt_of_more_than_half_a_minute_is_computed_once(model: Path, tmp_path: Path) -> None:
    """With two workers that could compute it, and short prompts beside it."""
    slow = FAKE | {"fake_token_us": 90_000.0, "max_batch_tokens": 32}
    prompts = [[7] * 400, *([index + 20] * 5 for index in range(4))]
    async with Cluster(tmp_path, model=model, prefill=2, decode=1, **slow) as cluster, client_of(cluster) as client:
        answers = await asyncio.gather(*(complete(client, prompt, timeout=300) for prompt in prompts))
        metrics = (await client.get("/metrics")).text
    assert [answer["tokens"] for answer in answers] == [expected(model, prompt) for prompt in prompts]
    [retries] = re.findall(r'^baton_gateway_events_total\{event="retries"[^}]*\} (.*)$', metrics, re.MULTILINE) or ["0"]
    assert float(retries) == 0


async def test_a_worker_with_both_roles_serves_alone(model: Path, tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, model=model, prefill=0, decode=0, both=1, **FAKE) as cluster,
        client_of(cluster) as client,
    ):
        prompts = [[index + 2] * (30 * index + 1) for index in range(8)]
        answers = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
    assert [answer["tokens"] for answer in answers] == [expected(model, prompt) for prompt in prompts]


@pytest.mark.long
async def test_a_pool_too_small_for_all_at_once_preempts_and_answers_all(model: Path, tmp_path: Path) -> None:
    """1 MiB of KV is 1024 blocks of the fake device; long answers of many sequences need more."""
    options = {**FAKE, "kv_memory_mb": 1, "fake_step_ms": 0}
    async with Cluster(tmp_path, model=model, prefill=1, decode=1, **options) as cluster, client_of(cluster) as client:
        prompts = [[index + 1] * 400 for index in range(24)]
        answers = await asyncio.gather(*(complete(client, prompt, max_tokens=500) for prompt in prompts))
        engine = FakeEngine(EngineConfig(model=model, cache=CacheConfig(kv_memory_bytes=1 << 20)))
        params = SamplingParams(max_tokens=500, temperature=0.0)
    assert [answer["tokens"] for answer in answers] == [engine.expected(prompt, 500, params) for prompt in prompts]
