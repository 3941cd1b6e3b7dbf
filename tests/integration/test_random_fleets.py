"""What holds for every placement: random fleets with random loads, prefixes and requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis.asyncio

from common.errors import UnavailableError
from common.messages import WorkerState
from gateway.placement.ledger import Ledger, PlacementRequest
from gateway.request.placement import Placement, Reason
from tests.integration.fleet import AT_MS, BLOCK_SIZE, TTL_MS, FleetStore, a_prompt, a_region, a_request, a_worker

BLOCKS = 12  # of the longest prompt


@dataclass
class Fleet:
    """Workers, what each holds of the prompt, and what was booked on each."""

    workers: dict[str, WorkerState]
    held: dict[str, int]
    booked: dict[str, list[int]] = field(default_factory=dict)  # reserved tokens of each sequence

    def decoders(self) -> set[str]:
        return {name for name, state in self.workers.items() if "decode" in state.roles}

    def has_room(self, name: str, request: PlacementRequest) -> bool:
        state, booked = self.workers[name], self.booked.get(name, [])
        layout = state.region.layout
        used = max(sum(booked), (layout.num_blocks - state.free_blocks) * BLOCK_SIZE)
        room = (layout.num_blocks + self.matched(name, request)) * BLOCK_SIZE - used
        return max(len(booked), state.running + state.waiting) < state.max_sequences and request.reserve_tokens <= room

    def matched(self, name: str, request: PlacementRequest) -> int:
        return min(self.held[name], len(request.digests))


def a_fleet(chance: random.Random) -> Fleet:
    """Up to seven workers. Small numbers, so that ties and zeros come up."""
    workers = {}
    for number in range(chance.choice([1, 2, 3, 4, 5, 7])):
        roles = chance.choice([["prefill"], ["decode"], ["prefill", "decode"]])
        num_blocks = chance.choice([20, 100])
        changes: dict[str, Any] = {
            "region": a_region(num_blocks=num_blocks, num_layers=chance.choice([1, 32]), num_kv_heads=8, head_dim=128),
            "running": chance.choice([0, 0, 1, 3, 7]) if "decode" in roles else 0,
            "waiting": chance.choice([0, 0, 1]) if "decode" in roles else 0,
            "queued_tokens": chance.choice([0, 0, 40, 500]),
            "free_blocks": chance.choice([num_blocks, num_blocks // 2, 3]),
            "max_sequences": chance.choice([4, 8]),
            "prefill_tokens_per_s": chance.choice([0.0, 1000.0, 1000.0, 4000.5]),
            "prefill_fixed_ms": chance.choice([0.0, 1.5, 20.0]),
            "prefill_bare_tokens_per_s": chance.choice([0.0, 0.0, 1500.0, 5000.0]),
            "prefill_bare_fixed_ms": chance.choice([0.0, 2.5]),
            "prefill_double_tokens": chance.choice([0.0, 100.0, 19_000.0]),
            "local_tokens_per_s": chance.choice([0.0, 300.0, 990.0]),
            "decode_step_ms": chance.choice([0.0, 0.1, 5.25, 9.0]),
            "link_bytes_per_s": chance.choice([0.0, 1e6, 3e9]),
        }
        workers[f"w{number}"] = a_worker(f"w{number}", *roles, **changes)
    return Fleet(workers, {name: chance.choice([0, 0, 3, 8, BLOCKS]) for name in workers})


def some_request(chance: random.Random, name: str) -> PlacementRequest:
    blocks = chance.choice([2, 5, BLOCKS])
    return a_request(
        name,
        digests=a_prompt(blocks=BLOCKS)[:blocks],
        num_tokens=blocks * BLOCK_SIZE + chance.randrange(BLOCK_SIZE),
        reserve_tokens=blocks * BLOCK_SIZE + 100,
        cut_over_tokens=chance.choice([-1, -1, -1, 0, 60]),
        now_ms=AT_MS,
    )


@pytest.mark.parametrize("fleets", [50, pytest.param(200, marks=pytest.mark.long)])
async def test_every_placement_keeps_the_rules(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis, fleets: int
) -> None:
    chance = random.Random(20261121)
    reasons = set()
    for number in range(fleets):
        await raw.flushall()
        fleet = a_fleet(chance)
        for name, state in fleet.workers.items():
            await store.register(state, ttl_ms=TTL_MS)
            await store.announce(name, 1, a_prompt(blocks=BLOCKS)[: fleet.held[name]], [])
        for turn in range(chance.randint(1, 6)):
            request = some_request(chance, f"{number}-{turn}")
            if not fleet.decoders():
                with pytest.raises(UnavailableError, match="no decode worker"):
                    await ledger.place(request)
                continue
            charged = {name: await ledger.charged(name, "prefill") for name in fleet.workers}
            placement = await ledger.place(request)
            check_place(fleet, request, placement)
            check_reason(fleet, request, placement)
            await check_charges(fleet, request, placement, ledger, charged)
            reasons.add(placement.reason)
    local = {Reason.LOCAL_EARLIER, Reason.LOCAL_SHORT, Reason.LOCAL_SAME_WORKER, Reason.LOCAL_NO_PREFILL}
    assert reasons == local | {Reason.LOAD, Reason.PREFIX, Reason.FULL}


def check_place(fleet: Fleet, request: PlacementRequest, placement: Placement) -> None:
    """Everybody has the role that it was chosen for, and nobody is booked beyond its room while another has some."""
    candidates = placement.decode or [placement.prefill]
    assert set(candidates) <= fleet.decoders()
    assert len(set(candidates)) == len(candidates) <= 4
    if placement.decode:
        assert "prefill" in fleet.workers[placement.prefill].roles
        assert placement.prefill not in fleet.decoders() or placement.prefill in placement.decode
    if any(fleet.has_room(name, request) for name in fleet.decoders()):
        assert fleet.has_room(candidates[0], request), (fleet, request, placement)
    assert placement.matched_blocks_prefill == fleet.matched(placement.prefill, request)
    assert placement.matched_blocks_decode == fleet.matched(candidates[0], request)


def check_reason(fleet: Fleet, request: PlacementRequest, placement: Placement) -> None:
    """The reason is true."""
    is_local = placement.reason.startswith("local")
    assert is_local == (not placement.decode)
    prefill = [name for name, state in fleet.workers.items() if "prefill" in state.roles]
    assert (placement.reason is Reason.LOCAL_NO_PREFILL) == (not prefill)
    if placement.reason is Reason.LOCAL_SHORT:
        left = request.num_tokens - placement.matched_blocks_decode * BLOCK_SIZE
        assert left <= request.cut_over_tokens
    if placement.reason is Reason.LOCAL_EARLIER:
        assert request.cut_over_tokens < 0
    if not is_local:
        nobody_has_room = not any(fleet.has_room(name, request) for name in fleet.decoders())
        holds = fleet.matched(placement.prefill, request) > 0
        assert placement.reason is (Reason.FULL if nobody_has_room else Reason.PREFIX if holds else Reason.LOAD)


async def check_charges(
    fleet: Fleet, request: PlacementRequest, placement: Placement, ledger: Ledger, before: dict[str, int]
) -> None:
    """The uncached tokens are charged where they are computed, the whole request where it decodes, and nothing elsewhere."""
    decoder = (placement.decode or [placement.prefill])[0]
    fleet.booked.setdefault(decoder, []).append(request.reserve_tokens)
    uncached = max(1, request.num_tokens - placement.matched_blocks_prefill * BLOCK_SIZE)
    for name in fleet.workers:
        added = await ledger.charged(name, "prefill") - before[name]
        assert added >= uncached if name == placement.prefill else added == 0
        assert await ledger.charged(name, "decode") == sum(fleet.booked.get(name, []))
