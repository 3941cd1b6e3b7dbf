"""The Lua functions and the gateway's own choice without Redis weigh alike: both choose the same in random fleets."""

from __future__ import annotations

import random
from typing import Any

import pytest

from common.messages import KVLayout, Region, WorkerState
from common.store import PlacementRequest, Store, connect_store
from gateway.placement import Candidate, Prompt, choose
from tests.integration.test_store import BLOCK_SIZE, TTL_MS, a_prompt, a_worker, patient

FLEETS = 250
NOW_MS = 4_102_444_800_000  # charges must not have expired


def a_fleet(chance: random.Random) -> list[WorkerState]:
    """Up to seven workers; small numbers, so that ties and zeros come up."""

    def one_of(*values: float) -> float:
        return chance.choice(values)

    fleet = []
    for number in range(chance.choice([1, 2, 3, 4, 5, 7])):
        layout = KVLayout(
            num_blocks=chance.choice([20, 100]),
            num_layers=chance.choice([1, 32]),
            block_size=BLOCK_SIZE,
            num_kv_heads=8,
            head_dim=128,
            dtype="bfloat16",
        )
        roles = chance.choice([["prefill"], ["decode"], ["prefill", "decode"]])
        changes: dict[str, Any] = {
            "region": Region(transport="shm", incarnation=1, layout=layout, address={}),
            "running": chance.choice([0, 0, 1, 3, 7]) if "decode" in roles else 0,
            "waiting": chance.choice([0, 0, 1]) if "decode" in roles else 0,
            "queued_tokens": chance.choice([0, 0, 40, 500]),
            "free_blocks": chance.choice([layout.num_blocks, layout.num_blocks // 2, 3]),
            "max_sequences": chance.choice([4, 8]),
            "prefill_tokens_per_s": one_of(0.0, 1000.0, 1000.0, 4000.5),
            "prefill_fixed_ms": one_of(0.0, 1.5, 20.0),
            "prefill_bare_tokens_per_s": one_of(0.0, 0.0, 1500.0, 5000.0),
            "prefill_bare_fixed_ms": one_of(0.0, 2.5),
            "prefill_double_tokens": one_of(0.0, 100.0, 19_000.0),
            "local_tokens_per_s": one_of(0.0, 300.0, 990.0),
            "decode_step_ms": one_of(0.0, 0.1, 5.25, 9.0),
            "link_bytes_per_s": one_of(0.0, 1e6, 3e9),
        }
        fleet.append(a_worker(f"w{number}", *roles, **changes))
    return fleet


async def test_both_choose_the_same(redis_url: str) -> None:
    async with connect_store(patient(redis_url)) as store:
        chance = random.Random(20261121)
        reasons = set()
        for number in range(FLEETS):
            await store._client.flushall()
            reasons.add(await agree(store, chance, number))
    assert reasons >= {"load", "prefix", "full", "local: earlier", "local: short", "local: same worker"}
    assert reasons >= {"local: no prefill worker", "no decode worker"}


async def agree(store: Store, chance: random.Random, number: int) -> str:
    """A few requests to one fleet, whose charges add up; the reason of the last."""
    fleet, prompt = a_fleet(chance), a_prompt(blocks=12)
    candidates, held = {state.worker: Candidate(state=state) for state in fleet}, dict[str, int]()
    for state in fleet:
        await store.register(state, ttl_ms=TTL_MS)
        held[state.worker] = chance.choice([0, 0, 3, 8, 12])
        await store.announce(state.worker, 1, prompt[: held[state.worker]], [])
    reason = ""
    for turn in range(chance.randint(1, 6)):
        blocks = chance.choice([2, 5, 12])
        request = PlacementRequest(
            request_id=f"{number}-{turn}",
            attempt=1,
            digests=prompt[:blocks],
            num_tokens=blocks * BLOCK_SIZE + chance.randrange(BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            reserve_tokens=blocks * BLOCK_SIZE + 100,
            deadline_ms=TTL_MS,
            model_fingerprint="model",
            cut_over_tokens=chance.choice([-1, -1, -1, 0, 60]),
            now_ms=NOW_MS,  # no time goes by: without Redis nobody knows how far a prompt is
        )
        fitting = Prompt(
            num_tokens=request.num_tokens,
            block_size=BLOCK_SIZE,
            reserve_tokens=request.reserve_tokens,
            cut_over_tokens=request.cut_over_tokens,
        )
        for state in fleet:
            candidates[state.worker].matched_blocks = min(held[state.worker], blocks)
        prefill, decode, reason = choose(list(candidates.values()), fitting)
        if not prefill:
            with pytest.raises(Exception, match=reason):
                await store.place(request)
            return reason
        placement = await store.place(request)
        assert (placement.prefill, placement.decode, placement.reason) == (prefill, decode, reason), fleet
        candidates[prefill].prefill_tokens += candidates[prefill].effort
        candidates[prefill].prefill_count += 1
        decoder = candidates[decode[0] if decode else prefill]
        decoder.decode_tokens += request.reserve_tokens
        decoder.decode_count += 1
    return reason
