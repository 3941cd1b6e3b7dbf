"""Life without some of the parts: a client, a worker or Redis goes while answers are made.

The workers run the fake device: answers are right only if every byte is.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.asking import FAKE, all_idle, client_of, complete, expected, until, watching
from tests.e2e.cluster import Cluster


async def test_without_redis_answers_go_on(model: Path, tmp_path: Path) -> None:
    async with Cluster(tmp_path, model=model, prefill=2, decode=2, **FAKE) as cluster:
        async with client_of(cluster) as client:
            cluster.redis.process.kill()
            await cluster.redis.process.wait()
            prompts = [[index + 1] * 40 for index in range(6)]
            answers = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
            assert [answer["tokens"] for answer in answers] == [expected(model, prompt) for prompt in prompts]
            assert (await client.get("/ready")).status_code == 200


@pytest.fixture(scope="module")
async def slow_pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A prefill and a decode worker with slow steps; each test leaves them with nothing to do."""
    async with Cluster(tmp_path_factory.mktemp("slow"), model=model, **{**FAKE, "fake_step_ms": 30}) as cluster:
        yield cluster


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_both_workers(stream: bool, slow_pair: Cluster) -> None:
    async with client_of(slow_pair) as client, watching(slow_pair) as (_, peers):
        body = {"model": "tiny", "prompt": [5] * 200, "max_tokens": 2000, "ignore_eos": True, "stream": stream}
        if stream:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        await until(peers, lambda states: any("decode" in s.roles and s.running for s in states))
                        break
        else:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(peers, lambda states: sum(state.running for state in states) > 0)
            asking.cancel()
            await asyncio.wait([asking])
        await until(peers, lambda states: len(states) == 2 and all_idle(states))


async def test_a_decode_worker_killed_mid_stream_is_replaced_without_a_wrong_token(model: Path, tmp_path: Path) -> None:
    count = 400  # seconds of it are left when the worker is killed
    async with Cluster(tmp_path, model=model, prefill=1, decode=2, **{**FAKE, "fake_step_ms": 10}) as cluster:
        async with client_of(cluster) as client, watching(cluster) as (_, peers):
            prompt = [9] * 50
            body = {
                "model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
                "stream": True, "return_token_ids": True,
            }  # fmt: skip
            tokens, killed = list[int](), ""
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    tokens += chunk["choices"][0]["token_ids"]
                    if len(tokens) >= 20 and not killed:
                        await until(peers, lambda states: any("decode" in s.roles and s.running for s in states))
                        killed = next(s.worker for s in peers.states.values() if "decode" in s.roles and s.running)
                        cluster.kill(killed)
            assert killed
            assert tokens == expected(model, prompt, count)


async def test_a_prefill_worker_killed_before_its_first_token_is_replaced(model: Path, tmp_path: Path) -> None:
    options = {**FAKE, "fake_token_us": 6000}
    async with Cluster(tmp_path, model=model, prefill=2, decode=1, **options) as cluster:
        async with client_of(cluster) as client, watching(cluster) as (_, peers):
            prompt = [3] * 700
            asking = asyncio.create_task(complete(client, prompt))
            await until(peers, lambda states: any("prefill" in s.roles and s.running for s in states))
            busy = next(s.worker for s in peers.states.values() if "prefill" in s.roles and s.running)
            cluster.kill(busy)
            answer = await asking
            await until(peers, lambda states: len(states) == 2 and all_idle(states))
    assert answer["tokens"] == expected(model, prompt)


async def test_sigterm_drains(model: Path, tmp_path: Path) -> None:
    options = {**FAKE, "fake_step_ms": 20, "drain_s": 60}  # a busy machine is in no hurry
    async with Cluster(tmp_path, model=model, **options) as cluster, client_of(cluster) as client:
        async with watching(cluster) as (_, peers):
            asking = asyncio.create_task(complete(client, [4] * 30, max_tokens=100))
            await until(peers, lambda states: any("decode" in s.roles and s.running for s in states))
        cluster.processes["decode-0"].terminate()
        answer = await asking
        assert answer["tokens"] == expected(model, [4] * 30, 100)
        assert await cluster.processes["decode-0"].wait() == 0
    log = (tmp_path / "decode-0.log").read_text()
    assert not re.search(r"Traceback|task_failed", log), log
