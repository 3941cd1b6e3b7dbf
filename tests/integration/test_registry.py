"""The registry: who lives, who may be chosen, and what its functions' number promises."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest
import redis.asyncio

from common.errors import UnavailableError
from common.store import DIGESTS_A_CALL, connect_store
from gateway.placement.ledger import Ledger, function_libraries
from tests.integration.conftest import patient_ledger
from tests.integration.fleet import KIND, TTL_MS, FleetStore, a_prompt, a_request, a_worker, live, patient, two_and_two
from tests.integration.waiting import eventually


async def test_a_worker_is_unknown_once_and_again_with_a_new_incarnation(
    store: FleetStore, raw: redis.asyncio.Redis
) -> None:
    assert await store.register(a_worker("w", "decode"))
    assert not await store.register(a_worker("w", "decode"))
    assert await store.register(a_worker("w", "decode", incarnation=2))
    assert await raw.hget("baton:worker:w", "incarnation") == b"2"


async def test_a_worker_leaves_unless_a_newer_incarnation_is_there(store: FleetStore, raw: redis.asyncio.Redis) -> None:
    await store.register(a_worker("w", "decode", incarnation=2), ttl_ms=TTL_MS)
    await store.unregister("w", 1)
    assert await live(raw) == [b"w"]
    await store.unregister("w", 2)
    assert await live(raw) == []


async def test_a_worker_whose_lease_ran_out_is_gone_with_its_charges(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    await store.register(a_worker("d0", "decode"))
    assert (await ledger.place(a_request())).prefill == "d0"
    await raw.delete("baton:worker:d0", f"baton:rate:{KIND}")  # as when the time is over that it was entered for
    assert await live(raw) == []
    with pytest.raises(UnavailableError, match="no decode worker"):
        await ledger.place(a_request("another"))
    assert [key async for key in raw.scan_iter("baton:*") if key[6:11] not in (b"place", b"told:")] == [
        b"baton:load:since"
    ]


@pytest.mark.parametrize(("protocol", "works"), [(0, True), (1, True), (2, True), (3, False)])
async def test_only_workers_one_protocol_version_away_are_chosen(
    store: FleetStore, ledger: Ledger, protocol: int, works: bool
) -> None:
    await store.register(a_worker("d0", "decode", v=protocol), ttl_ms=TTL_MS)
    if works:
        assert (await ledger.place(a_request())).prefill == "d0"
    else:
        with pytest.raises(UnavailableError, match="no decode worker"):
            await ledger.place(a_request())


async def test_the_functions_of_another_release_stay_beside_ours(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    """Its processes load its library whenever they start, under the names that it had."""
    await raw.function_load(
        "#!lua name=baton\nredis.register_function('baton_place', function() return 7 end)", replace=True
    )
    await two_and_two(store)
    await store.load_libraries()
    assert await raw.fcall("baton_place", 0) == 7
    assert (await ledger.place(a_request())).decode


@pytest.mark.usefixtures("store")  # it installs the functions
async def test_calls_of_this_library_s_number_mean_the_same_as_ever(raw: redis.asyncio.Redis) -> None:
    """As the first release with `baton4_…` makes them: a change that breaks this test needs another number."""
    record = {
        "protocol": 1,
        "roles": ["decode"],
        "status": "ready",
        "kind": "model/float32/16",
        "block_size": 16,
        "block_bytes": 1024,
        "num_blocks": 100,
        "free_blocks": 100,
        "max_sequences": 8,
        "sequences": 0,
        "queued_tokens": 0,
        "prefill_tokens_per_s": 1000.0,
        "prefill_fixed_ms": 0.0,
        "attention_doubles_at": 0.0,
        "local_tokens_per_s": 0.0,
        "decode_step_ms": 0.0,
        "link_bytes_per_s": 0.0,
        "from a later release": True,
    }
    entry = ["d0", "5", msgspec.msgpack.encode(record)]
    for _ in range(2):
        assert await raw.fcall("baton4_enter", 0, "gateway", TTL_MS, 0, *entry, "d1", "x", b"?") == [b"d1"]
    assert await raw.get("baton:told:d0") == b"5:0"
    await raw.set("baton:news:d0", b"5:1:1:8:digest-0digest-9")
    assert [await raw.fcall("baton4_news", 0, "d0") for _ in range(2)] == [1, 0]
    assert await raw.get("baton:told:d0") == b"5:1"
    place = ["r:1", 32, 16, 48, TTL_MS, 0, "model/float32/16", ",,", 0, 1, b"digest-0", b"digest-1"]
    answer = await raw.fcall("baton4_place", 0, *place)
    assert answer[:5] == [b"d0", b"5", 1, 1, b"local: no prefill worker"]
    assert len(answer) == 6
    assert all(b"=" in cost for cost in answer[5].split())
    assert await raw.fcall("baton4_charged", 0, "decode", "d0") == 48
    assert await raw.fcall("baton4_release", 0, 0, "r:1", ",decode,", ",d0,") == 1
    assert await raw.fcall("baton4_charged", 0, "decode", "d0") == 0
    assert await raw.fcall("baton4_leave", 0, "d0", "4") == 1
    assert await raw.exists("baton:worker:d0")
    assert await raw.fcall("baton4_leave", 0, "d0", "5") == 1
    assert not await raw.exists("baton:worker:d0", "baton:home:d0")


async def test_only_ready_workers_of_the_model_that_are_not_excluded_are_chosen(
    store: FleetStore, ledger: Ledger
) -> None:
    await two_and_two(store)
    await store.register(a_worker("p1", "prefill", status="draining"))
    await store.register(a_worker("d1", "decode", kind=dataclasses.replace(KIND, model="another")))
    for number in range(6):
        placement = await ledger.place(a_request(f"request-{number}"))
        assert (placement.prefill, placement.decode) == ("p0", ["d0"])
    assert (await ledger.place(a_request(exclude=["p0"]))).reason == "local: no prefill worker"
    with pytest.raises(UnavailableError):
        await ledger.place(a_request(exclude=["d0"]))


@pytest.mark.parametrize("other", [{"model": "another"}, {"kv_dtype": "bfloat16"}, {"block_size": 32}])
async def test_only_workers_with_the_request_s_kind_of_blocks_are_candidates(
    store: FleetStore, ledger: Ledger, other: dict[str, Any]
) -> None:
    """Two models, or two forms of one model's blocks, in one registry: neither gets the other's requests."""
    kinds = {"ours": KIND, "theirs": dataclasses.replace(KIND, **other)}
    for name, kind in kinds.items():
        for role in ("prefill", "decode"):
            await store.register(a_worker(f"{name}-{role}", role, kind=kind), ttl_ms=TTL_MS)
    prompt = a_prompt()
    await store.announce("theirs-prefill", 1, prompt, [])  # not even a holder of the prefix
    for number in range(6):
        for name, kind in kinds.items():
            placement = await ledger.place(a_request(f"{name}-{number}", kind=kind, digests=prompt))
            assert (placement.prefill, placement.decode) == (f"{name}-prefill", [f"{name}-decode"])
            assert placement.costs["candidates"] == 2
    with pytest.raises(UnavailableError, match="no decode worker"):
        await ledger.place(a_request("nobody's", kind=dataclasses.replace(KIND, model="a third")))


async def test_a_worker_that_comes_back_with_other_blocks_leaves_its_old_kind(
    store: FleetStore, ledger: Ledger
) -> None:
    other = dataclasses.replace(KIND, kv_dtype="bfloat16")
    await store.register(a_worker("d0", "decode"), ttl_ms=TTL_MS)
    await store.register(a_worker("d0", "decode", kind=other, incarnation=2), ttl_ms=TTL_MS)
    assert (await ledger.place(a_request("new", kind=other))).prefill == "d0"
    with pytest.raises(UnavailableError, match="no decode worker"):
        await ledger.place(a_request("old"))


async def test_a_worker_says_everything_again_when_redis_lost_it_and_only_then(
    raw: redis.asyncio.Redis, redis_url: str
) -> None:
    """A worker's own store, and a gateway's beside it."""
    state, blocks = a_worker("d0", "decode"), a_prompt()
    async with (
        connect_store(patient(redis_url), libraries=function_libraries()) as gateways,
        connect_store(patient(redis_url)) as worker,
    ):
        ledger = patient_ledger(gateways)

        async def tell(*digests: bytes) -> None:
            telling = asyncio.create_task(worker.announce("d0", 1, list(digests), []))
            await eventually(lambda: ledger.take_news(["d0"]))
            await telling

        assert await worker.register(state)  # nobody has heard it yet
        with pytest.raises(UnavailableError, match="no gateway has entered this worker"):
            await worker.announce("d0", 1, blocks, [])
        await ledger.enter([state], gateway="gateway")
        assert not await worker.register(state)
        await tell(*blocks[:2])
        await tell(*blocks[2:])
        assert not await worker.register(state)
        await raw.flushall()
        assert await worker.register(state)
        await ledger.enter([state], gateway="gateway")
        await tell(*blocks)
        assert not await worker.register(state)
        assert (await ledger.place(a_request(digests=blocks))).matched_blocks_decode == len(blocks)
        later = a_worker("d0", "decode", incarnation=2)
        await ledger.enter([later], gateway="gateway")
        assert await worker.register(state)  # another process has its name now
        await raw.set("baton:news:d0", b"1:9:1:16:" + blocks[0])
        assert await ledger.take_news(["d0"])  # a late word of the earlier one
        assert await raw.smembers(b"baton:block:" + blocks[0]) == {b"d0@1"}
        assert await raw.get("baton:told:d0") == b"2:0"


async def test_news_that_a_gateway_takes_too_late_hide_none_that_follow(
    raw: redis.asyncio.Redis, redis_url: str
) -> None:
    """What a worker no longer waits for may still be taken, at any time later."""
    state, (late, *blocks) = a_worker("d0", "decode"), [b"%016d" % number for number in range(2 * DIGESTS_A_CALL + 1)]
    async with (
        connect_store(patient(redis_url), libraries=function_libraries()) as gateways,
        connect_store(patient(redis_url)) as worker,
    ):
        ledger = patient_ledger(gateways)
        await ledger.enter([state], gateway="gateway")
        given_up = asyncio.create_task(worker.announce("d0", 1, [late], []))
        await eventually(lambda: raw.exists("baton:news:d0"))
        while not given_up.done():  # `wait_for` of Python 3.11, in the client, may swallow a cancellation
            given_up.cancel()
            await asyncio.wait([given_up], timeout=0.1)
        assert await ledger.take_news(["d0"])
        telling = asyncio.create_task(worker.announce("d0", 1, blocks, [late]))

        async def has_more_or_ended() -> bool:
            return telling.done() or await raw.exists("baton:news:d0") > 0

        while not telling.done():
            await eventually(has_more_or_ended)
            await ledger.take_news(["d0"])
        await telling
        assert not await worker.register(state)
    found = {key.removeprefix(b"baton:block:") async for key in raw.scan_iter("baton:block:*", count=1000)}
    assert (len(found), found) == (len(blocks), set(blocks))
