"""The KV of an answer serves the next turn where that is computed, pulled from the worker that generated it: whole processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import redis.asyncio

from common.messages import WorkerState
from tests.e2e.asking import all_idle, client_of, complete, expected, until, watching
from tests.e2e.cluster import Cluster

BLOCK, ANSWER = 16, 100
PROMPT = list(range(30, 132))
SLOW = {
    "fake": True,
    "kv_memory_mb": 8,
    "fake_token_us": 3000,
}  # computing takes longer than pulling, however busy the machine
PATIENT = SLOW | {"pull_s": 60}  # as long as a peer that is there takes to push, however busy the machine


async def answered(client: httpx.AsyncClient, cluster: Cluster, model: Path) -> list[int]:
    """The first turn and its answer, once the index has all of its blocks."""
    answer = await complete(client, PROMPT, max_tokens=ANSWER)
    turn = [*PROMPT, *expected(model, PROMPT, ANSWER)]
    assert answer["tokens"] == turn[len(PROMPT) :]
    async with redis.asyncio.Redis.from_url(cluster.redis.url) as store, asyncio.timeout(60):
        while len([key async for key in store.scan_iter("baton:block:*")]) < (len(turn) - 1) // BLOCK:
            await asyncio.sleep(0.05)
    return turn


def handed_over(states: list[WorkerState]) -> bool:
    """A worker told that it pushed blocks, and none but the decode worker holds any since."""
    given = [state for state in states if state.worker != "decode-0"]
    return any(state.totals.pushed_blocks for state in given) and not any(state.held_blocks for state in given)


@pytest.mark.parametrize("transport", ["shm", pytest.param("ucx", marks=pytest.mark.long)])
async def test_the_next_turn_pulls_what_the_decode_worker_generated(
    transport: str, model: Path, tmp_path: Path
) -> None:
    async with (
        Cluster(tmp_path / "run", model=model, transport=transport, **PATIENT) as cluster,
        client_of(cluster) as client,
        watching(cluster) as (_, peers),
    ):
        turn = await answered(client, cluster, model)
        second = [*turn, 7, 8, 9]
        answer = await complete(client, second)
        assert answer["tokens"] == expected(model, second)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(turn) - 1) // BLOCK * BLOCK  # type: ignore[index]
        kept = (len(turn) - 1) // BLOCK - len(PROMPT) // BLOCK
        await until(peers, lambda states: any(state.totals.pulls.tokens == kept * BLOCK for state in states))
        await until(peers, lambda states: any(state.totals.kept_bytes for state in states))
        await until(peers, all_idle)


@pytest.mark.long
async def test_what_the_decode_worker_evicted_to_host_memory_is_pulled(model: Path, tmp_path: Path) -> None:
    options = PATIENT | {"fake_token_us": 500, "kv_memory_mb": 1, "kv_host_mb": 16}  # a pool of 512 blocks
    async with (
        Cluster(tmp_path / "run", model=model, **options) as cluster,
        client_of(cluster) as client,
        watching(cluster) as (_, peers),
    ):
        turn = await answered(client, cluster, model)

        async def others(numbers: range) -> None:
            for number in numbers:
                await complete(client, [(7 * number + at * at) % 400 + 10 for at in range(1600)], max_tokens=2)

        await others(range(3))  # half of the pool is taken: what was released first is stored
        kept = (len(turn) - 1) // BLOCK
        await until(peers, lambda states: all(state.totals.host.stored_blocks >= kept for state in states))
        await others(range(3, 9))
        answer = await complete(client, [*turn, 7, 8, 9])
        assert answer["tokens"] == expected(model, [*turn, 7, 8, 9])
        own = len(PROMPT) // BLOCK
        await until(peers, lambda states: any(state.totals.pulls.tokens == (kept - own) * BLOCK for state in states))
        await until(peers, all_idle)


@pytest.mark.long
async def test_a_peer_that_dies_while_it_is_pulled_from_costs_a_prefill_and_no_answer(
    model: Path, tmp_path: Path
) -> None:
    """It stands still when it is asked: it may write at any moment, until its process is gone."""
    async with (
        Cluster(tmp_path / "run", model=model, prefill=2, **SLOW) as cluster,
        client_of(cluster) as client,
        watching(cluster) as (_, peers),
    ):
        turn = await answered(client, cluster, model)
        await until(peers, handed_over)  # a heartbeat of the first turn shows blocks held for its handoff
        cluster.pause("decode-0")
        asking = asyncio.create_task(complete(client, [*turn, 7, 8, 9]))
        await until(peers, lambda states: any(state.held_blocks for state in states if state.worker != "decode-0"))
        cluster.kill("decode-0")
        await cluster.processes["decode-0"].wait()
        await cluster.start("decode-0")
        assert (await asking)["tokens"] == expected(model, [*turn, 7, 8, 9])
        await until(peers, lambda states: any(state.totals.pulls.failed for state in states))
        await cluster.until_ready()
        await until(peers, all_idle)
