"""A working set larger than the pool, in separate processes: prompts come back from host memory, and texts stay the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.asking import client_of, until, watching
from tests.e2e.cluster import Cluster
from tests.e2e.evicting import LENGTH, NUM_TOKENS, OPTIONS, PROMPTS, asked, asked_until_answered
from tests.e2e.wide import WideCluster
from tests.models import build_tiny_model
from tests.reference import greedy_tokens

LEAST_FOUND = len(PROMPTS) * LENGTH / 4  # tokens: a busy machine may evict some before they are copied


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("computes", ["prefill-0", "decode-0"])
async def test_prompts_that_the_pool_evicted_come_back_through_kills_too(computes: str, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama")
    expected = greedy_tokens(model, PROMPTS, NUM_TOKENS)
    async with (
        Cluster(tmp_path / "run", model=model, prefill=int(computes == "prefill-0"), **OPTIONS) as cluster,
        client_of(cluster) as client,
        watching(cluster) as (_, peers),
    ):
        for _ in range(2):
            answers = [await asked(client, prompt) for prompt in PROMPTS]
            assert [tokens for tokens, _ in answers] == expected
        assert sum(cached for _, cached in answers) > LEAST_FOUND
        await until(peers, lambda states: any(state.totals.host.hit_tokens > LEAST_FOUND for state in states))
        asking = [asyncio.create_task(asked_until_answered(client, prompt)) for prompt in PROMPTS]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        cluster.kill(computes)
        await cluster.processes[computes].wait()
        await cluster.start(computes)
        assert [tokens for tokens, _ in await asyncio.gather(*asking)] == expected
        await cluster.until_ready()
        assert [tokens for tokens, _ in [await asked(client, prompt) for prompt in PROMPTS]] == expected
        await until(
            peers, lambda states: all(s.free_blocks == s.region.layout.num_blocks and not s.held_blocks for s in states)
        )


@pytest.mark.long
@pytest.mark.parametrize(("width", "depth"), [(1, 1), (2, 1), (1, 2)])
async def test_a_worker_finds_what_another_one_of_its_host_stored_before_it_was_killed(
    width: int, depth: int, tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=3)
    expected = greedy_tokens(model, PROMPTS, NUM_TOKENS)
    options = OPTIONS | {"kv_host_mb": "8:shared"}
    widths, depths = (dict.fromkeys(("prefill-0", "decode-0"), count) for count in (width, depth))
    async with (
        WideCluster(tmp_path / "run", model=model, prefill=1, widths=widths, depths=depths, **options) as cluster,
        client_of(cluster) as client,
        watching(cluster) as (_, peers),
    ):
        for _ in range(2):
            assert [tokens for tokens, _ in [await asked(client, prompt) for prompt in PROMPTS]] == expected
        cluster.kill("prefill-0")
        await cluster.processes["prefill-0"].wait()
        answers = [await asked_until_answered(client, prompt) for prompt in PROMPTS]  # by the worker that decoded
        assert [tokens for tokens, _ in answers] == expected
        await until(peers, lambda states: any(state.totals.host.hit_tokens > LEAST_FOUND for state in states))
