"""Registry, prefix index and load ledger against a real Redis or Valkey server."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis.asyncio

from common.blocks import hash_blocks, hash_root
from common.errors import UnavailableError
from common.messages import KVLayout, Region, WorkerState
from common.servers import run_redis
from common.store import BREAKER_ERRORS, Placement, PlacementRequest, RedisSettings, Store, connect_store
from tests.integration.waiting import LIMIT_S, eventually

BLOCK_SIZE = 16
ROOT = hash_root(model="model", kv_dtype="float32", block_size=BLOCK_SIZE)
TTL_MS = 60_000


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A plain client on a server that was flushed."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def store(redis_url: str, raw: redis.asyncio.Redis) -> AsyncIterator[Store]:
    async with connect_store(patient(redis_url)) as store:
        yield store


def patient(url: str) -> RedisSettings:
    return RedisSettings(url=url, place_timeout_s=LIMIT_S, timeout_s=LIMIT_S)  # a busy machine fails no test


def a_worker(worker: str, *roles: str, **changes: Any) -> WorkerState:
    layout = KVLayout(num_blocks=100, num_layers=1, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=8, dtype="float32")
    state = WorkerState(
        worker=worker,
        incarnation=1,
        roles=list(roles),
        status="ready",
        model="model",
        model_fingerprint="model",
        tokenizer_fingerprint="tokenizer",
        vocab_size=100,
        max_model_len=2048,
        region=Region(transport="shm", incarnation=1, layout=layout, address={}),
        free_blocks=100,
        max_sequences=8,
        prefill_tokens_per_s=1000.0,
    )
    return msgspec.structs.replace(state, **changes)


async def two_and_two(store: Store) -> None:
    """Two workers of each role."""
    for state in (*(a_worker(f"p{n}", "prefill") for n in (0, 1)), *(a_worker(f"d{n}", "decode") for n in (0, 1))):
        await store.register(state, ttl_ms=TTL_MS)


def a_request(request_id: str = "request", **changes: Any) -> PlacementRequest:
    values: dict[str, Any] = {
        "attempt": 1,
        "digests": [],
        "num_tokens": 64,
        "block_size": BLOCK_SIZE,
        "reserve_tokens": 96,
        "deadline_ms": TTL_MS,
        "model_fingerprint": "model",
    }
    return PlacementRequest(request_id=request_id, **(values | changes))


def a_prompt(first: int = 0, *, blocks: int = 4) -> list[bytes]:
    return hash_blocks(ROOT, range(first, first + blocks * BLOCK_SIZE), BLOCK_SIZE)


# -- registry ----------------------------------------------------------------------------------------------------------


async def test_a_worker_is_unknown_once_and_again_with_a_new_incarnation(store: Store) -> None:
    assert await store.register(a_worker("w", "decode"))
    assert not await store.register(a_worker("w", "decode"))
    assert await store.register(a_worker("w", "decode", incarnation=2))
    assert [state.incarnation for state in await store.workers()] == [2]


async def test_a_worker_leaves_unless_a_newer_incarnation_is_there(store: Store) -> None:
    await store.register(a_worker("w", "decode", incarnation=2), ttl_ms=TTL_MS)
    await store.unregister("w", 1)
    assert [state.worker for state in await store.workers()] == ["w"]
    await store.unregister("w", 2)
    assert await store.workers() == []


async def test_a_worker_whose_lease_ran_out_is_gone_with_its_charges(store: Store, raw: redis.asyncio.Redis) -> None:
    await store.register(a_worker("d0", "decode"), ttl_ms=50)
    assert (await store.place(a_request())).prefill == "d0"

    async def nobody() -> bool:
        return await store.workers() == []

    await eventually(nobody)
    with pytest.raises(UnavailableError, match="no decode worker"):
        await store.place(a_request("another"))
    assert [key async for key in raw.scan_iter("baton:*") if b":placed:" not in key] == [b"baton:load:since"]


async def test_asking_who_is_there_changes_nothing(store: Store, raw: redis.asyncio.Redis) -> None:
    """The planner's user may ask: it must not be able to make anybody forget a worker's charges."""
    await store.register(a_worker("d0", "decode"), ttl_ms=TTL_MS)
    await store.place(a_request())
    await raw.delete("baton:worker:d0")  # as when its lease runs out

    async def everything() -> dict[bytes, bytes | None]:
        return {key: await raw.dump(key) async for key in raw.scan_iter("baton:*")}

    before = await everything()
    assert await store.workers() == []
    assert await everything() == before


@pytest.mark.parametrize(("protocol", "works"), [(0, True), (1, True), (2, True), (3, False)])
async def test_only_workers_one_protocol_version_away_are_chosen(store: Store, protocol: int, works: bool) -> None:
    await store.register(a_worker("d0", "decode", v=protocol), ttl_ms=TTL_MS)
    if works:
        assert (await store.place(a_request())).prefill == "d0"
    else:
        with pytest.raises(UnavailableError, match="no decode worker"):
            await store.place(a_request())


async def test_the_functions_of_another_release_stay_beside_ours(store: Store, raw: redis.asyncio.Redis) -> None:
    """Its processes load its library whenever they start, under the names that it had."""
    await raw.function_load(
        "#!lua name=baton\nredis.register_function('baton_place', function() return 7 end)", replace=True
    )
    await two_and_two(store)
    await store.load_library()
    assert await raw.fcall("baton_place", 0) == 7
    assert (await store.place(a_request())).decode


async def test_calls_of_this_library_s_number_mean_the_same_as_ever(store: Store, raw: redis.asyncio.Redis) -> None:
    """As the first release with `baton2_…` makes them. Who would have to change this test changes the number instead."""
    fields = [
        "state",
        b"s",
        "roles",
        "decode",
        "status",
        "ready",
        "fingerprint",
        "f",
        "rate",
        "1000.0",
        "free_blocks",
        100,
    ]
    fields += ["num_blocks", 100, "sequences", 0, "max_sequences", 8, "queued_tokens", 0, "fixed_ms", "0.0"]
    fields += ["local_rate", "0.0", "step_ms", "0.0", "link", "0", "block_bytes", 1024, "block_size", 16, "protocol", 1]
    assert await raw.fcall("baton2_register", 0, "d0", "5", TTL_MS, 0, *fields) == 1
    assert await raw.fcall("baton2_register", 0, "d0", "5", TTL_MS, 0, *fields) == 0
    assert await raw.fcall("baton2_states", 0) == [b"s"]
    assert await raw.fcall("baton2_announce", 0, "d0@5", 1, b"digest-0") == 1
    place = ["r:1", 32, 16, 48, TTL_MS, 0, "f", ",,", 0, 1, b"digest-0", b"digest-1"]
    answer = await raw.fcall("baton2_place", 0, *place)
    assert answer[:5] == [b"d0", b"5", 1, 1, b"local: no prefill worker"]
    assert len(answer) == 6
    assert all(b"=" in cost for cost in answer[5].split())
    assert await raw.fcall("baton2_charged", 0, "decode", "d0") == 48
    assert await raw.fcall("baton2_release", 0, "r:1", "decode", 0, "d0") == 1
    assert await raw.fcall("baton2_charged", 0, "decode", "d0") == 0
    assert await raw.fcall("baton2_unregister", 0, "d0", "5") == 1
    assert await raw.fcall("baton2_states", 0) == []


async def test_only_ready_workers_of_the_model_that_are_not_excluded_are_chosen(store: Store) -> None:
    await two_and_two(store)
    await store.register(a_worker("p1", "prefill", status="draining"))
    await store.register(a_worker("d1", "decode", model_fingerprint="another"))
    for number in range(6):
        placement = await store.place(a_request(f"request-{number}"))
        assert (placement.prefill, placement.decode) == ("p0", ["d0"])
    assert (await store.place(a_request(exclude=["p0"]))).reason == "local: no prefill worker"
    with pytest.raises(UnavailableError):
        await store.place(a_request(exclude=["d0"]))


# -- prefixes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holder", ["p0", "p1"])
async def test_a_prompt_goes_where_its_prefix_is(store: Store, holder: str) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce(holder, 1, prompt[:3], [])
    placement = await store.place(a_request(digests=prompt))
    assert (placement.prefill, placement.matched_blocks_prefill, placement.reason) == (holder, 3, "prefix")
    assert await store.charged(holder, "prefill") == 64 - 3 * BLOCK_SIZE


async def test_the_longest_prefix_without_a_gap_counts(store: Store) -> None:
    await two_and_two(store)
    prompt = a_prompt(blocks=6)
    await store.announce("p0", 1, prompt[:1] + prompt[2:], [])
    await store.announce("p1", 1, prompt[:2], [])
    placement = await store.place(a_request(digests=prompt, num_tokens=96))
    assert (placement.prefill, placement.matched_blocks_prefill) == ("p1", 2)


async def doubt(store: Store, *workers: str) -> None:
    """As when Redis was emptied while these worked."""
    for worker in workers:
        await store._client.hdel(f"baton:worker:{worker}", "known")


async def test_a_long_queue_outweighs_a_prefix(store: Store) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p0", 1, prompt, [])
    await store.register(a_worker("p0", "prefill", queued_tokens=1000))
    await doubt(store, "p0")
    assert (await store.place(a_request(digests=prompt))).prefill == "p1"


async def test_the_faster_worker_takes_the_longer_queue(store: Store) -> None:
    await two_and_two(store)
    await store.register(a_worker("p0", "prefill", prefill_tokens_per_s=8000.0))
    chosen = Counter([(await store.place(a_request(f"request-{number}"))).prefill for number in range(24)])
    assert chosen == {"p0": 23, "p1": 1}


async def test_who_has_measured_nothing_is_not_taken_for_faster_than_the_others(store: Store) -> None:
    """A worker without a request so far must not win by a fixed cost that it doesn't know yet."""
    await two_and_two(store)
    prompt = a_prompt()
    await store.register(a_worker("p0", "prefill", prefill_fixed_ms=100.0))
    await store.register(a_worker("p1", "prefill", prefill_tokens_per_s=0.0))
    await store.announce("p0", 1, prompt[:2], [])
    assert (await store.place(a_request(digests=prompt))).prefill == "p0"


async def test_decode_goes_where_the_blocks_are(store: Store) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("d1", 1, prompt, [])
    placement = await store.place(a_request(digests=prompt))
    assert (placement.decode, placement.matched_blocks_decode) == (["d1", "d0"], 4)


async def test_a_block_that_left_the_pool_is_no_hit(store: Store) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p1", 1, prompt, [])
    await store.announce("p1", 1, [], prompt[1:])
    assert (await store.place(a_request(digests=prompt))).matched_blocks_prefill == 1


async def test_blocks_of_a_dead_incarnation_are_no_hit_and_are_cleared_away(
    store: Store, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p1", 1, prompt, [])
    await store.register(a_worker("p1", "prefill", incarnation=2), ttl_ms=TTL_MS)
    assert (await store.place(a_request(digests=prompt))).matched_blocks_prefill == 0
    assert not await raw.exists(b"baton:block:" + prompt[0])


async def test_thousands_of_blocks_are_announced_in_parts_and_found(store: Store) -> None:
    await two_and_two(store)
    prompt = a_prompt(blocks=2500)
    await store.announce("p1", 1, prompt, [])
    placement = await store.place(a_request(digests=prompt, num_tokens=2500 * BLOCK_SIZE))
    assert (placement.prefill, placement.matched_blocks_prefill) == ("p1", 2500)


async def test_after_a_flush_workers_are_unknown_and_announcing_again_restores_hits(
    store: Store, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p1", 1, prompt, [])
    await raw.flushall()
    assert await store.register(a_worker("p1", "prefill"))
    assert await store.register(a_worker("d0", "decode"))
    assert (await store.place(a_request("before", digests=prompt))).matched_blocks_prefill == 0
    await store.announce("p1", 1, prompt, [])
    assert (await store.place(a_request("after", digests=prompt))).matched_blocks_prefill == 4


async def test_a_hot_prefix_is_computed_elsewhere_once_its_holders_queue_takes_longer_than_that(store: Store) -> None:
    """64 tokens take 64 ms, 16 of them 16 ms: the holder is worth a queue of twice 48 ms while the other one idles."""
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p0", 1, prompt[:3], [])
    now_ms = int((await store._client.time())[0]) * 1000
    requests = [a_request(f"r{number}", digests=prompt, now_ms=now_ms) for number in range(8)]
    chosen = [(await store.place(request)).prefill for request in requests]
    assert chosen == ["p0", "p0", "p0", "p0", "p0", "p0", "p1", "p0"]


async def test_the_end_of_a_long_prompt_costs_more_than_its_beginning(store: Store) -> None:
    """16 tokens behind 48 cached ones take 16 + 16 * 56 / 20 ms where a token behind 20 takes twice its time."""
    await store.register(
        a_worker(
            "p0", "prefill", prefill_bare_tokens_per_s=1000.0, prefill_double_tokens=20.0, prefill_tokens_per_s=300.0
        )
    )
    await store.register(a_worker("d0", "decode"))
    prompt = a_prompt()
    await store.announce("p0", 1, prompt[:3], [])
    placement = await store.place(a_request(digests=prompt, num_tokens=64, cut_over_tokens=0))
    assert placement.costs["predicted_ms"] == pytest.approx(16 + 16 * 56 / 20, abs=1)
    assert await store.charged("p0", "prefill") == 61


async def test_a_prefix_is_worth_more_where_everybody_has_a_queue(store: Store) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p0", 1, prompt[:3], [])
    await store.register(a_worker("p0", "prefill", queued_tokens=350), ttl_ms=TTL_MS)
    await doubt(store, "p0", "p1")
    assert (await store.place(a_request("idle", digests=prompt, exclude=["d0"]))).prefill == "p1"
    await store.release("idle", 1, stage="all")
    await store.register(a_worker("p1", "prefill", queued_tokens=300), ttl_ms=TTL_MS)
    assert (await store.place(a_request("busy", digests=prompt, exclude=["d0"]))).prefill == "p0"


async def test_a_long_prefix_is_found_where_its_blocks_end(store: Store) -> None:
    """Behind the first blocks the length is found by halving."""
    prompt = a_prompt(blocks=900)
    lengths = {"p0": 899, "p1": 64, "p2": 65, "p3": 511}
    for worker, length in lengths.items():
        await store.register(a_worker(worker, "prefill"), ttl_ms=TTL_MS)
        await store.announce(worker, 1, prompt[:length], [])
    await store.register(a_worker("d0", "decode", max_sequences=100), ttl_ms=TTL_MS)
    for worker, length in lengths.items():
        others = [other for other in lengths if other != worker]
        placement = await store.place(a_request(worker, digests=prompt, num_tokens=900 * BLOCK_SIZE, exclude=others))
        assert (placement.prefill, placement.matched_blocks_prefill) == (worker, length)


async def test_a_holder_among_many_workers_is_found_by_its_prefix(store: Store) -> None:
    """Only the least loaded are compared, and who holds the prompt: here the most loaded of fifty."""
    prompt = a_prompt()
    for number in range(50):
        state = a_worker(f"p{number:02}", "prefill", queued_tokens=30 if number == 49 else 0)
        await store.register(state, ttl_ms=TTL_MS)
    await store.register(a_worker("d0", "decode"), ttl_ms=TTL_MS)
    await store.announce("p49", 1, prompt[:3], [])
    placement = await store.place(a_request(digests=prompt))
    assert (placement.prefill, placement.matched_blocks_prefill) == ("p49", 3)
    assert placement.costs["candidates"] == 16 + 1 + 1


async def test_the_dead_among_the_least_loaded_and_among_the_holders_are_passed_over(store: Store) -> None:
    prompt = a_prompt()
    for number in range(40):
        await store.register(a_worker(f"p{number:02}", "prefill"), ttl_ms=TTL_MS if number == 39 else 1)
        await store.announce(f"p{number:02}", 1, prompt if number < 39 else prompt[:2], [])
    await store.register(a_worker("d0", "decode"), ttl_ms=TTL_MS)

    async def is_alone() -> bool:
        return len(await store.workers()) == 2

    await eventually(is_alone)
    for number in range(40):  # `workers` forgot them; their blocks are still in the index
        placement = await store.place(a_request(f"r{number}", digests=prompt))
        assert placement.prefill == "p39"
        await store.release(f"r{number}", 1, stage="all")
    assert placement.matched_blocks_prefill == 2


# -- local prefill -----------------------------------------------------------------------------------------------------


async def test_a_short_uncached_rest_is_prefilled_on_the_decode_worker(store: Store) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    assert (await store.place(a_request("long", digests=prompt, cut_over_tokens=20))).reason == "load"
    await store.announce("d1", 1, prompt[:3], [])
    placement = await store.place(a_request("short", digests=prompt, cut_over_tokens=20))
    assert placement == Placement(
        prefill="d1",
        decode=[],
        prefill_incarnation=1,
        matched_blocks_prefill=3,
        matched_blocks_decode=3,
        reason="local: short",
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "num_tokens", "reason"),
    [
        ({}, {}, 48, "local: earlier"),  # nobody decodes there: the hand-over is spared
        ({}, {}, 64, "load"),  # a pass of 64 ms is too long for those who join
        ({}, {"running": 1}, 48, "load"),  # beside others it is thought to be four times as slow
        ({"queued_tokens": 300}, {"running": 1}, 48, "local: earlier"),  # but the queue is longer than that
        ({"queued_tokens": 300}, {"running": 1, "local_tokens_per_s": 120.0}, 48, "load"),  # what was measured counts
        ({}, {"running": 1, "local_tokens_per_s": 990.0, "decode_step_ms": 100.0}, 48, "load"),
        ({"prefill_fixed_ms": 500.0}, {"running": 1, "prefill_tokens_per_s": 1000.0}, 48, "local: earlier"),
        ({"prefill_tokens_per_s": 0.0}, {}, 48, "load"),  # nothing was measured
        (  # the part of a pass that its rate leaves out is the one fitted with it
            {"prefill_bare_tokens_per_s": 1000.0, "prefill_bare_fixed_ms": 500.0},
            {"running": 1},
            48,
            "local: earlier",
        ),
    ],
)
async def test_a_prompt_is_prefilled_where_its_first_token_is_predicted_earlier(
    store: Store, prefill: dict[str, Any], decode: dict[str, Any], num_tokens: int, reason: str
) -> None:
    await store.register(a_worker("p0", "prefill", **prefill))
    await store.register(a_worker("d0", "decode", **({"prefill_tokens_per_s": 0.0} | decode)))
    placement = await store.place(a_request(num_tokens=num_tokens, cut_over_tokens=-1))
    assert (placement.reason, placement.prefill) == (reason, "d0" if reason.startswith("local") else "p0")


@pytest.mark.parametrize(
    ("share", "age_ms", "reason"), [(0.5, 0, "load"), (1.0, 0, "local: earlier"), (1.0, 60_000, "load")]
)
async def test_a_busy_prefill_worker_is_spared_for_those_who_come_next(
    store: Store, share: float, age_ms: int, reason: str
) -> None:
    """What is idle at the moment, but was given work for most of the last seconds, will have a queue again."""
    for state in (a_worker("p0", "prefill"), a_worker("d0", "decode", prefill_tokens_per_s=0.0)):
        await store.register(state)
    now_ms = int((await store._client.time())[0]) * 1000
    await store._client.hset("baton:load:busy:p0", mapping={"share": share, "at": now_ms - age_ms})
    placement = await store.place(a_request(num_tokens=64, cut_over_tokens=-1))
    assert placement.reason == reason
    assert (placement.costs["crowding_ms"] > 0) == (reason != "load")


async def test_work_that_a_prefill_worker_is_given_is_remembered_until_it_leaves(store: Store) -> None:
    for state in (a_worker("p0", "prefill"), a_worker("d0", "decode", prefill_tokens_per_s=0.0)):
        await store.register(state)
    for number in range(2):
        await store.place(a_request(f"r{number}", num_tokens=1000, cut_over_tokens=0))
        await store.release(f"r{number}", 1, stage="all")
    assert 0.2 < float(await store._client.hget("baton:load:busy:p0", "share")) <= 0.4  # of 5 s, 2 s of work
    await store.place(a_request("long", num_tokens=60_000, cut_over_tokens=0))
    share = await store._client.hget("baton:load:busy:p0", "share")
    assert float(share) == 1.0  # a minute: no more than all of its time
    await store.unregister("p0", 1)
    assert not await store._client.exists("baton:load:busy:p0")


async def test_work_that_nobody_can_measure_is_none(store: Store) -> None:
    """Else the first prompt of all, thought to take minutes, sent those behind it elsewhere for half a minute."""
    for state in (
        a_worker("p0", "prefill", prefill_tokens_per_s=0.0),
        a_worker("d0", "decode", prefill_tokens_per_s=0.0),
    ):
        await store.register(state)
    assert (await store.place(a_request(cut_over_tokens=-1))).prefill == "p0"
    assert not await store._client.exists("baton:load:busy:p0")


async def test_a_queue_takes_its_passes_fixed_parts_too(store: Store) -> None:
    await store.register(a_worker("p0", "prefill", prefill_fixed_ms=100.0))
    await store.register(a_worker("d0", "decode"))
    await store.place(a_request("first", num_tokens=500))
    placement = await store.place(a_request("second", num_tokens=48))
    assert placement.costs["prefill_ms"] == pytest.approx(100 + 500 + 100 + 48, abs=60)  # less what passed meanwhile


async def test_no_figure_is_told_where_nobody_measured_anything(store: Store) -> None:
    await store.register(a_worker("p0", "prefill", prefill_tokens_per_s=0.0))
    await store.register(a_worker("d0", "decode", prefill_tokens_per_s=0.0))
    placement = await store.place(a_request(num_tokens=48, cut_over_tokens=-1))
    assert (placement.reason, placement.costs["predicted_ms"], placement.costs["prefill_ms"]) == ("load", -1, -1)


@pytest.mark.parametrize(("age_ms", "chosen"), [(0, "p1"), (120_000, "p0")])
async def test_the_ledger_is_newer_than_heartbeats_unless_it_was_lost(store: Store, age_ms: int, chosen: str) -> None:
    """p0 said that it had a queue; nothing is charged to it, because that is computed or because Redis was emptied."""
    await store.register(a_worker("p0", "prefill", queued_tokens=500))
    await store.register(a_worker("p1", "prefill"))
    await store.register(a_worker("d0", "decode"))
    now_ms = int((await store._client.time())[0]) * 1000
    await store._client.set("baton:load:since", now_ms - age_ms)
    assert (await store.place(a_request(cut_over_tokens=0))).prefill == chosen


async def test_a_worker_that_was_idle_is_known_to_the_ledger_until_that_is_lost(store: Store) -> None:
    """Its heartbeat is older than the ledger from then on; after `FLUSHALL` it counts again."""
    busy = a_worker("p0", "prefill", queued_tokens=500)
    for state in (a_worker("p0", "prefill"), busy, a_worker("p1", "prefill"), a_worker("d0", "decode")):
        await store.register(state)
    assert (await store.place(a_request("a", cut_over_tokens=0))).prefill == "p0"
    await store._client.flushall()
    for state in (busy, a_worker("p1", "prefill"), a_worker("d0", "decode")):
        await store.register(state)
    assert (await store.place(a_request("b", cut_over_tokens=0))).prefill == "p1"


async def test_the_prompt_being_computed_counts_less_with_time(store: Store) -> None:
    """Both have two prompts; p1 began earlier."""
    for worker in ("p0", "p1"):
        await store.register(a_worker(worker, "prefill"))
    await store.register(a_worker("d0", "decode", max_sequences=50))
    now_ms = int((await store._client.time())[0]) * 1000
    await store._client.set("baton:load:since", 1)
    for number, at in (("a", 0), ("b", 40), ("c", 0), ("d", 40)):
        await store.place(a_request(number, num_tokens=64, cut_over_tokens=0, now_ms=now_ms + at))
    assert [await store.charged(worker, "prefill") for worker in ("p0", "p1")] == [128, 128]
    await store._client.set("baton:load:began:p0", now_ms + 80)
    await store._client.set("baton:load:began:p1", now_ms + 40)
    assert (await store.place(a_request("e", num_tokens=64, cut_over_tokens=0, now_ms=now_ms + 90))).prefill == "p1"


async def test_a_burst_is_shared_between_prefill_and_decode_workers(store: Store) -> None:
    """Each prompt is charged where it is computed, so the next one sees it, whichever gateway places it."""
    await store.register(a_worker("p0", "prefill"))
    await store.register(a_worker("d0", "decode", running=1, local_tokens_per_s=500.0, max_sequences=50))
    chosen = Counter(
        [
            (await store.place(a_request(f"r{number}", num_tokens=16, cut_over_tokens=-1))).prefill
            for number in range(12)
        ]
    )
    assert chosen == {"p0": 9, "d0": 3}


async def test_a_long_prompt_is_not_computed_where_many_would_wait_for_it(store: Store) -> None:
    """Two seconds of queue are no reason to stop eight sequences for one."""
    await store.register(a_worker("p0", "prefill", queued_tokens=2000))
    await store.register(a_worker("d0", "decode", running=8, max_sequences=50, local_tokens_per_s=900.0))
    assert (await store.place(a_request("long", num_tokens=1000, cut_over_tokens=-1))).reason == "load"
    assert (await store.place(a_request("short", num_tokens=100, cut_over_tokens=-1))).reason == "local: earlier"


async def test_a_rate_measured_beside_decoding_stands_for_the_one_that_nobody_has(store: Store) -> None:
    """Without any prefill rate the prefill worker is taken for as fast as that, not for one token a second."""
    await store.register(a_worker("p0", "prefill", prefill_tokens_per_s=0.0))
    await store.register(a_worker("d0", "decode", running=1, prefill_tokens_per_s=0.0, local_tokens_per_s=500.0))
    placement = await store.place(a_request(cut_over_tokens=-1))
    assert (placement.reason, placement.costs["prefill_ms"]) == ("load", 128.0)


async def test_the_compared_costs_come_with_the_answer(store: Store) -> None:
    await store.register(a_worker("p0", "prefill", queued_tokens=100, prefill_fixed_ms=1.0))
    await store.register(a_worker("d0", "decode", running=1, local_tokens_per_s=500.0, decode_step_ms=7.0))
    placement = await store.place(a_request(num_tokens=20, cut_over_tokens=-1))
    assert placement.reason == "local: earlier"
    assert placement.costs == {
        "predicted_ms": 47.0,
        "prefill_ms": 121.0,
        "local_ms": 47.0,
        "transfer_ms": 2.0,
        "crowding_ms": 0.0,
        "matched_tokens": 0,
        "candidates": 2,
    }


async def test_a_worker_with_both_roles_serves_alone(store: Store) -> None:
    await store.register(a_worker("w", "prefill", "decode"))
    placement = await store.place(a_request())
    assert (placement.prefill, placement.decode, placement.reason) == ("w", [], "local: same worker")


# -- decode ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d0", "d1", "chosen"),
    [
        ({"running": 2, "decode_step_ms": 9.0}, {"running": 2, "decode_step_ms": 8.0}, "d1"),
        ({"running": 6, "decode_step_ms": 8.6}, {"running": 2, "decode_step_ms": 8.5}, "d0"),  # the faster device
        ({"running": 4, "decode_step_ms": 9.0}, {"decode_step_ms": 30.0}, "d1"),  # idle: that was its last full batch
        ({"running": 2, "decode_step_ms": 5.0, "free_blocks": 5}, {"running": 7, "decode_step_ms": 9.0}, "d1"),  # room
    ],
)
async def test_decode_goes_where_there_is_room_and_the_step_is_predicted_shortest(
    store: Store, d0: dict[str, Any], d1: dict[str, Any], chosen: str
) -> None:
    await store.register(a_worker("p0", "prefill"))
    await store.register(a_worker("d0", "decode", **d0))
    await store.register(a_worker("d1", "decode", **d1))
    assert (await store.place(a_request())).decode[0] == chosen


async def test_what_the_prefill_does_not_hide_of_the_hand_over_decides_between_decode_workers(store: Store) -> None:
    """A slow link makes the holder of the prefix the better place, although its step is longer."""
    prompt = a_prompt()
    for link, chosen in ((1e9, "d0"), (1e3, "d1")):
        await store.register(a_worker("p0", "prefill", link_bytes_per_s=link))
        await store.register(a_worker("d0", "decode", running=1, decode_step_ms=8.0))
        await store.register(a_worker("d1", "decode", running=1, decode_step_ms=12.0))
        await store.announce("d1", 1, prompt, [])
        placement = await store.place(a_request(f"{link}", digests=prompt))
        assert placement.decode[0] == chosen
        await store.release(f"{link}", 1, stage="all")


# -- ledger ------------------------------------------------------------------------------------------------------------


async def test_a_charge_is_exact_and_given_back_once(store: Store) -> None:
    await two_and_two(store)
    placement = await store.place(a_request(num_tokens=50, reserve_tokens=70))
    decode = placement.decode[0]
    assert await store.charged(placement.prefill, "prefill") == 50
    assert await store.charged(decode, "decode") == 70
    for _ in range(2):
        await store.release("request", 1, stage="prefill")
    assert (await store.charged(placement.prefill, "prefill"), await store.charged(decode, "decode")) == (0, 70)
    for _ in range(2):
        await store.release("request", 1, stage="all")
    assert await store.charged(decode, "decode") == 0


async def test_a_charge_is_found_at_the_named_workers_when_its_record_was_evicted(
    store: Store, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    placement = await store.place(a_request())
    await raw.delete("baton:placed:request:1")
    await store.release("request", 1, stage="prefill", workers=["p0", "p1"])
    assert await store.charged(placement.prefill, "prefill") == 0


async def test_a_new_incarnation_starts_without_the_charges_of_the_old_one(store: Store) -> None:
    await two_and_two(store)
    await store.place(a_request(exclude=["p1", "d1"]))
    await store.register(a_worker("p0", "prefill", incarnation=2), ttl_ms=TTL_MS)
    assert await store.charged("p0", "prefill") == 0
    await store.release("request", 1, stage="all")  # of the old one's: nothing happens to the new one's
    assert await store.charged("p0", "prefill") == 0


async def test_placing_the_same_attempt_again_charges_it_once(store: Store) -> None:
    await two_and_two(store)
    for _ in range(3):
        await store.place(a_request(num_tokens=50, reserve_tokens=70))
    assert [await store.charged(worker, "prefill") for worker in ("p0", "p1")] == [50, 0]
    assert [await store.charged(worker, "decode") for worker in ("d0", "d1")] == [70, 0]


async def test_a_charge_expires_with_its_deadline_and_takes_only_itself_along(store: Store) -> None:
    await two_and_two(store)
    await store.place(a_request("short", num_tokens=50, reserve_tokens=70, deadline_ms=50, exclude=["p1", "d1"]))
    await store.place(a_request("long", num_tokens=5, reserve_tokens=7, exclude=["p1", "d1"]))

    async def is_expired() -> bool:
        return (await store.charged("p0", "prefill"), await store.charged("d0", "decode")) == (5, 7)

    await eventually(is_expired)


async def test_loads_spread_over_equal_workers(store: Store) -> None:
    await two_and_two(store)
    placements = [await store.place(a_request(f"request-{number}")) for number in range(8)]
    assert Counter(placement.prefill for placement in placements) == {"p0": 4, "p1": 4}
    assert Counter(placement.decode[0] for placement in placements) == {"d0": 4, "d1": 4}


@pytest.mark.parametrize("limit", [{"max_sequences": 10}, {"free_blocks": 100}], ids=["sequences", "blocks"])
async def test_two_gateways_at_once_never_overbook_a_worker_while_another_has_room(
    store: Store, redis_url: str, limit: dict[str, int]
) -> None:
    # Room for 10 requests each: of 160 tokens in 100 blocks of 16, or 10 sequences.
    roomy = {"max_sequences": 1000} | limit
    for worker in ("d0", "d1", "d2"):
        await store.register(a_worker(worker, "decode", **roomy), ttl_ms=TTL_MS)
    await store.register(a_worker("p0", "prefill"), ttl_ms=TTL_MS)
    held = a_prompt()
    await store.announce("d0", 1, held[:1], [])  # everybody would like d0
    reserve = 160 if "free_blocks" in limit else 1
    async with connect_store(patient(redis_url)) as other:
        placements = await asyncio.gather(
            *(
                gateway.place(
                    a_request(f"{name}-{number}", reserve_tokens=reserve, digests=held if name == "a" else [])
                )
                for number in range(15)
                for name, gateway in (("a", store), ("b", other))
            )
        )
        chosen = Counter(placement.decode[0] for placement in placements)
        assert chosen == {"d0": 10, "d1": 10, "d2": 10}
        assert "full" not in {placement.reason for placement in placements}
        assert (await other.place(a_request("one too many", reserve_tokens=reserve))).reason == "full"


async def test_what_a_worker_says_of_its_load_counts_when_it_is_more_than_was_charged(store: Store) -> None:
    await two_and_two(store)
    await store.register(a_worker("d0", "decode", running=7))
    await store.register(a_worker("p0", "prefill", queued_tokens=500))
    await doubt(store, "p0")
    placement = await store.place(a_request())
    assert (placement.prefill, placement.decode) == ("p1", ["d1", "d0"])


# -- a server that goes away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flush", ["FUNCTION FLUSH", "FLUSHALL", "SCRIPT FLUSH"])
async def test_the_library_is_loaded_again_when_it_is_gone(store: Store, raw: redis.asyncio.Redis, flush: str) -> None:
    await raw.execute_command(*flush.split())
    await two_and_two(store)
    assert (await store.place(a_request())).prefill == "p0"


async def test_a_killed_redis_is_unavailable_at_once_and_back_after_its_restart(tmp_path: Path) -> None:
    async with run_redis(data_dir=tmp_path) as server, connect_store(patient(server.url)) as store:
        await store.register(a_worker("w", "decode"))
        server.process.kill()
        await server.process.wait()
        async with asyncio.timeout(2.0):  # the client's own retries would take many seconds
            for _ in range(BREAKER_ERRORS + 20):
                with pytest.raises(UnavailableError):
                    await store.place(a_request())
        async with run_redis(port=server.port, data_dir=tmp_path):
            assert await eventually(lambda: registered_as_unknown(store))
            assert (await store.place(a_request())).prefill == "w"


async def test_a_hung_redis_is_unavailable_after_the_time_out_and_answers_are_not_mixed_up_later(
    tmp_path: Path,
) -> None:
    settings = RedisSettings(url="", place_timeout_s=0.05, timeout_s=LIMIT_S)
    async with run_redis(data_dir=tmp_path) as server:
        async with connect_store(dataclasses.replace(settings, url=server.url)) as store:
            await store.register(a_worker("w", "decode"), ttl_ms=TTL_MS)
            server.process.send_signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(LIMIT_S / 2):
                    with pytest.raises(UnavailableError, match="TimeoutError"):
                        await store.place(a_request())
            finally:
                server.process.send_signal(signal.SIGCONT)
            assert [state.worker for state in await store.workers()] == ["w"]
            await store.release("request", 1, stage="all")  # it may have been placed after all
            assert await store.charged("w", "decode") == 0


async def test_a_store_without_redis_at_first_works_once_there_is_one(tmp_path: Path) -> None:
    async with run_redis(data_dir=tmp_path) as server:
        port = server.port
    async with connect_store(RedisSettings(url=f"redis://127.0.0.1:{port}")) as store:
        with pytest.raises(UnavailableError):
            await store.workers()
        async with run_redis(port=port, data_dir=tmp_path):
            assert await eventually(lambda: registered_as_unknown(store))


async def registered_as_unknown(store: Store) -> bool:
    try:
        return await store.register(a_worker("w", "decode"), ttl_ms=TTL_MS)
    except UnavailableError:
        return False  # the breaker is open for a second
