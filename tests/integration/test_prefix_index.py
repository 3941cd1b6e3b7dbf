"""The prefix index: which worker holds how much of a prompt, and what that is worth."""

from __future__ import annotations

import pytest
import redis.asyncio

from common.messages import HostTierTotals, WorkerTotals
from gateway.placement.ledger import Ledger
from tests.integration.fleet import (
    BLOCK_SIZE,
    TTL_MS,
    FleetStore,
    a_holder,
    a_prompt,
    a_request,
    a_worker,
    doubt,
    holding,
    live,
    now_ms,
    release,
    two_and_two,
)
from tests.integration.waiting import eventually


@pytest.mark.parametrize("holder", ["p0", "p1"])
async def test_a_prompt_goes_where_its_prefix_is(store: FleetStore, ledger: Ledger, holder: str) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce(holder, 1, prompt[:3], [])
    placement = await ledger.place(a_request(digests=prompt))
    assert (placement.prefill, placement.matched_blocks_prefill, placement.reason) == (holder, 3, "prefix")
    assert await ledger.charged(holder, "prefill") == 64 - 3 * BLOCK_SIZE


async def test_the_longest_prefix_without_a_gap_counts(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    prompt = a_prompt(blocks=6)
    await store.announce("p0", 1, prompt[:1] + prompt[2:], [])
    await store.announce("p1", 1, prompt[:2], [])
    placement = await ledger.place(a_request(digests=prompt, num_tokens=96))
    assert (placement.prefill, placement.matched_blocks_prefill) == ("p1", 2)


async def test_decode_goes_where_the_blocks_are(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("d1", 1, prompt, [])
    placement = await ledger.place(a_request(digests=prompt))
    assert (placement.decode, placement.matched_blocks_decode) == (["d1", "d0"], 4)


async def test_a_block_that_left_the_pool_is_no_hit(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p1", 1, prompt, [])
    await store.announce("p1", 1, [], prompt[1:])
    assert (await ledger.place(a_request(digests=prompt))).matched_blocks_prefill == 1


async def test_blocks_of_a_dead_incarnation_are_no_hit_and_are_cleared_away(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p1", 1, prompt, [])
    await store.register(a_worker("p1", "prefill", incarnation=2), ttl_ms=TTL_MS)
    assert (await ledger.place(a_request(digests=prompt))).matched_blocks_prefill == 0
    assert not await raw.exists(b"baton:block:" + prompt[0])


async def test_thousands_of_blocks_are_announced_in_parts_and_found(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    prompt = a_prompt(blocks=2500)
    await store.announce("p1", 1, prompt, [])
    placement = await ledger.place(a_request(digests=prompt, num_tokens=2500 * BLOCK_SIZE))
    assert (placement.prefill, placement.matched_blocks_prefill) == ("p1", 2500)


async def test_after_a_flush_workers_are_unknown_and_announcing_again_restores_hits(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p1", 1, prompt, [])
    await raw.flushall()
    assert await store.register(a_worker("p1", "prefill"))
    assert await store.register(a_worker("d0", "decode"))
    assert (await ledger.place(a_request("before", digests=prompt))).matched_blocks_prefill == 0
    await store.announce("p1", 1, prompt, [])
    assert (await ledger.place(a_request("after", digests=prompt))).matched_blocks_prefill == 4


async def test_a_hot_prefix_is_computed_elsewhere_once_its_holders_queue_takes_longer_than_that(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    """64 tokens take 64 ms, 16 of them 16 ms: the holder is worth a queue of twice 48 ms while the other one idles."""
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p0", 1, prompt[:3], [])
    at_ms = await now_ms(raw)
    requests = [a_request(f"r{number}", digests=prompt, now_ms=at_ms) for number in range(8)]
    chosen = [(await ledger.place(request)).prefill for request in requests]
    assert chosen == ["p0", "p0", "p0", "p0", "p0", "p0", "p1", "p0"]


async def test_the_end_of_a_long_prompt_costs_more_than_its_beginning(store: FleetStore, ledger: Ledger) -> None:
    """16 tokens behind 48 cached ones take 16 + 16 * 56 / 20 ms where a token behind 20 takes twice its time."""
    await store.register(
        a_worker(
            "p0", "prefill", prefill_bare_tokens_per_s=1000.0, prefill_double_tokens=20.0, prefill_tokens_per_s=300.0
        )
    )
    await store.register(a_worker("d0", "decode"))
    prompt = a_prompt()
    await store.announce("p0", 1, prompt[:3], [])
    placement = await ledger.place(a_request(digests=prompt, num_tokens=64, cut_over_tokens=0))
    assert placement.costs["predicted_ms"] == pytest.approx(16 + 16 * 56 / 20, abs=1)
    assert await ledger.charged("p0", "prefill") == 61


async def test_a_prefix_is_worth_more_where_everybody_has_a_queue(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p0", 1, prompt[:3], [])
    await store.register(a_worker("p0", "prefill", queued_tokens=350), ttl_ms=TTL_MS)
    await doubt(raw, "p0", "p1")
    assert (await ledger.place(a_request("idle", digests=prompt, exclude=["d0"]))).prefill == "p1"
    await release(ledger, "idle", 1, stage="all")
    await store.register(a_worker("p1", "prefill", queued_tokens=300), ttl_ms=TTL_MS)
    assert (await ledger.place(a_request("busy", digests=prompt, exclude=["d0"]))).prefill == "p0"


async def test_a_long_prefix_is_found_where_its_blocks_end(store: FleetStore, ledger: Ledger) -> None:
    """Behind the first blocks the length is found by halving."""
    prompt = a_prompt(blocks=900)
    lengths = {"p0": 899, "p1": 64, "p2": 65, "p3": 511}
    for worker, length in lengths.items():
        await store.register(a_worker(worker, "prefill"), ttl_ms=TTL_MS)
        await store.announce(worker, 1, prompt[:length], [])
    await store.register(a_worker("d0", "decode", max_sequences=100), ttl_ms=TTL_MS)
    for worker, length in lengths.items():
        others = [other for other in lengths if other != worker]
        placement = await ledger.place(a_request(worker, digests=prompt, num_tokens=900 * BLOCK_SIZE, exclude=others))
        assert (placement.prefill, placement.matched_blocks_prefill) == (worker, length)


async def test_a_holder_among_many_workers_is_found_by_its_prefix(store: FleetStore, ledger: Ledger) -> None:
    """Only the least loaded are compared, and who holds the prompt: here the most loaded of fifty."""
    prompt = a_prompt()
    for number in range(50):
        state = a_worker(f"p{number:02}", "prefill", queued_tokens=30 if number == 49 else 0)
        await store.register(state, ttl_ms=TTL_MS)
    await store.register(a_worker("d0", "decode"), ttl_ms=TTL_MS)
    await store.announce("p49", 1, prompt[:3], [])
    placement = await ledger.place(a_request(digests=prompt))
    assert (placement.prefill, placement.matched_blocks_prefill) == ("p49", 3)
    assert placement.costs["candidates"] == 16 + 1 + 1


async def test_the_dead_among_the_least_loaded_and_among_the_holders_are_passed_over(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    prompt = a_prompt()
    for number in range(40):
        await store.register(a_worker(f"p{number:02}", "prefill"), ttl_ms=TTL_MS if number == 39 else 1)
        await store.announce(f"p{number:02}", 1, prompt if number < 39 else prompt[:2], [])
    await store.register(a_worker("d0", "decode"), ttl_ms=TTL_MS)

    async def is_alone() -> bool:
        return len(await live(raw)) == 2

    await eventually(is_alone)
    for number in range(40):  # `workers` forgot them; their blocks are still in the index
        placement = await ledger.place(a_request(f"r{number}", digests=prompt))
        assert placement.prefill == "p39"
        await release(ledger, f"r{number}", 1, stage="all")
    assert placement.matched_blocks_prefill == 2


@pytest.mark.parametrize("lower", ["p0", "p1"])
async def test_what_must_be_loaded_costs_its_time(store: FleetStore, ledger: Ledger, lower: str) -> None:
    await two_and_two(store)
    prompt, upper = a_prompt(blocks=6), {"p0": "p1", "p1": "p0"}[lower]
    for worker in ("p0", "p1"):
        await store.register(a_holder(worker))
    await holding(store, lower, prompt, below=5, on_disk=2)
    await holding(store, upper, prompt, below=1)
    placement = await ledger.place(a_request(digests=prompt, num_tokens=100))
    assert (placement.prefill, placement.matched_blocks_prefill) == (upper, 6)
    size = a_worker(upper, "prefill").region.layout.block_bytes
    assert placement.costs["loading_ms"] == pytest.approx(1000 * size / 1e9, abs=0.06)


async def test_loading_is_cheaper_than_computing_and_dearer_than_nothing(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    prompt = a_prompt(blocks=6)
    await store.register(a_holder("p1"))
    await holding(store, "p1", prompt, below=6, on_disk=6)
    placement = await ledger.place(a_request(digests=prompt, num_tokens=100))
    assert (placement.prefill, placement.reason) == ("p1", "prefix")
    await store.register(a_holder("p1", disk_bytes_per_s=1.0))  # a disk that hangs
    assert (await ledger.place(a_request("other", digests=prompt, num_tokens=100))).prefill == "p0"


async def test_a_decode_worker_is_given_what_it_has_below_its_pool(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    prompt = a_prompt(blocks=6)
    await store.register(a_holder("d1", "decode"))
    await holding(store, "d1", prompt, below=4)
    placement = await ledger.place(a_request(digests=prompt, num_tokens=100))
    assert placement.decode[0] == "d1"
    assert placement.matched_blocks_decode == 2


@pytest.mark.parametrize("tiers", [0, 1, 2])
async def test_a_placement_keeps_what_candidates_have_tiers_for(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis, tiers: int
) -> None:
    await two_and_two(store)
    prompt, some = a_prompt(), HostTierTotals(capacity_bytes=1 << 30)
    totals = [WorkerTotals(), WorkerTotals(host=some), WorkerTotals(host=some, disk=some)][tiers]
    await store.register(a_worker("p1", "prefill", totals=totals))
    await holding(store, "p1", prompt, below=4, on_disk=4)
    keys = [b"baton:block:" + prompt[0] + suffix for suffix in (b"", b"\1", b"\2")]
    for key in keys:
        assert await raw.expire(key, 600)
    number = 0
    while await raw.ttl(keys[0]) <= 600:  # some placements renew, by the clock
        await ledger.place(a_request(f"r{number}", digests=prompt))
        await release(ledger, f"r{number}", 1, stage="all")
        number += 1
    assert [await raw.ttl(key) > 600 for key in keys] == [at <= tiers for at in range(3)]
