"""Prompts whose beginning comes from host memory: nobody waits for them, and they hold nothing while they wait for others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from common.messages import SamplingParams
from engine.engine import Chunk
from prefill.role import PrefillRole
from prefill.stop import Stop
from tests.fakes.copier import HandCopier
from tests.fakes.device import settled
from tests.fakes.worker import BLOCK, Bench, claim, new_fake_engine, new_job, running_bench
from worker.tier.host_memory import HostMemory
from worker.tier.host_store import PrivateStore
from worker.tier.host_tier import HostTier

NUM_BLOCKS = 12
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
PROMPTS = [list(range(first, first + 21)) for first in (10, 40, 70, 100)]  # five full blocks of six


class Prefill:
    """The role, which answers prompts one pass after the other."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.pool, self.copier = bench, bench.pool, HandCopier()
        memory = HostMemory(bench.engine.kv, bench.engine.layout, PrivateStore(4 * NUM_BLOCKS))
        self.tier = HostTier(self.pool, memory, copier=self.copier, wake=bench.context.passes.wake)
        context = replace(bench.context, cache=replace(bench.context.cache, tier=self.tier))
        self.role = PrefillRole(context, max_requests=4)
        bench.roles.attach(self.role, active=True)

    async def ask(self, name: str, prompt: list[int]) -> None:
        await self.role.start(claim(new_job(name, prompt, ONE_TOKEN, prefill=True), self.bench.gateway))

    async def step(self) -> list[Chunk]:
        """Run a pass; return what it computed."""
        chunks = self.role.plan(8)
        self.role.apply(list(zip(chunks, self.bench.engine.launch(chunks).wait(), strict=True)))
        await settled()
        return chunks

    async def run(self) -> None:
        """Run passes until nothing is left to compute."""
        while await self.step():
            pass

    async def answered(self, name: str, prompt: list[int]) -> bool:
        await self.ask(name, prompt)
        await self.run()
        self.copier.land()
        await self.run()
        return self.is_right(name, prompt)

    def is_right(self, name: str, prompt: list[int]) -> bool:
        return self.bench.gateway.streams.get(name) == self.bench.engine.expected(prompt, 1, ONE_TOKEN)


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    async with running_bench(new_fake_engine(NUM_BLOCKS)) as bench:
        prefill = Prefill(bench)
        for number, prompt in enumerate(PROMPTS):
            assert await prefill.answered(f"first {number}", prompt)
        assert prefill.tier.totals().stored_blocks
        yield prefill
        prefill.copier.land()
        await prefill.run()
        await settled()
        assert prefill.role.idle()
        assert prefill.pool.num_used == 0


async def test_a_prompt_finds_what_the_pool_evicted(prefill: Prefill) -> None:
    await prefill.ask("again", PROMPTS[0])
    assert await prefill.step() == []
    prefill.copier.land()
    (chunk,) = await prefill.step()
    assert (chunk.start, chunk.num_tokens) == (5 * BLOCK, 1)
    assert prefill.is_right("again", PROMPTS[0])
    assert prefill.tier.totals().hit_tokens == 5 * BLOCK


async def test_others_are_claimed_and_computed_while_a_prompt_is_loaded(prefill: Prefill) -> None:
    await prefill.ask("again", PROMPTS[0])
    assert await prefill.step() == []
    assert prefill.role.room() > 0
    await prefill.ask("new", [7] * 9)
    await prefill.run()
    assert prefill.is_right("new", [7] * 9)
    assert "again" not in prefill.bench.gateway.streams


async def test_a_prompt_that_found_no_room_after_its_load_holds_nothing(prefill: Prefill) -> None:
    await prefill.ask("again", PROMPTS[0])
    assert await prefill.step() == []
    others = prefill.pool.allocate(prefill.pool.num_free)
    prefill.copier.land()
    assert await prefill.step() == []
    assert prefill.pool.num_used == len(others)
    assert prefill.role.room() == 0
    prefill.pool.release(others)
    await prefill.run()
    assert prefill.is_right("again", PROMPTS[0])


async def test_a_prompt_that_is_cancelled_while_it_is_loaded_leaves_what_comes_to_the_cache(prefill: Prefill) -> None:
    await prefill.ask("again", PROMPTS[0])
    assert await prefill.step() == []
    (request,) = prefill.role.requests
    request.stop(Stop.CANCELLED)
    await settled()
    assert prefill.role.idle()
    prefill.copier.land()
    await prefill.ask("once more", PROMPTS[0])
    (chunk,) = await prefill.step()
    assert chunk.start == 5 * BLOCK


async def test_a_wrong_byte_is_computed_again(prefill: Prefill) -> None:
    for slot in range(4 * NUM_BLOCKS):
        prefill.tier._memory.slot(slot)[3] ^= 1
    await prefill.ask("again", PROMPTS[0])
    assert await prefill.step() == []
    prefill.copier.land()
    (chunk,) = await prefill.step()
    assert chunk.start == 0
    await prefill.run()
    assert prefill.is_right("again", PROMPTS[0])
    assert prefill.tier.totals().bad_digests == 5
