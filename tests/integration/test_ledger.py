"""The load ledger: charges, what they say of a worker's queue, and how they end."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest
import redis.asyncio

from common.store import connect_store
from gateway.placement.ledger import Ledger, function_libraries
from gateway.placement.placer import Releases
from gateway.request.placement import Charged
from services.runtime.servers import run_redis
from tests.integration.conftest import patient_ledger
from tests.integration.fleet import (
    AT_MS,
    TTL_MS,
    FleetStore,
    a_prompt,
    a_request,
    a_worker,
    doubt,
    now_ms,
    patient,
    release,
    two_and_two,
)
from tests.integration.waiting import eventually


async def test_work_that_a_prefill_worker_is_given_is_remembered_until_it_leaves(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    for state in (a_worker("p0", "prefill"), a_worker("d0", "decode", prefill_tokens_per_s=0.0)):
        await store.register(state)
    for number in range(2):
        await ledger.place(a_request(f"r{number}", num_tokens=1000, cut_over_tokens=0))
        await release(ledger, f"r{number}", 1, stage="all")
    assert 0.2 < float(await raw.hget("baton:load:busy:p0", "share")) <= 0.4  # of 5 s, 2 s of work
    await ledger.place(a_request("long", num_tokens=60_000, cut_over_tokens=0))
    share = await raw.hget("baton:load:busy:p0", "share")
    assert float(share) == 1.0  # a minute: no more than all of its time
    await store.unregister("p0", 1)
    assert not await raw.exists("baton:load:busy:p0")


async def test_work_that_nobody_can_measure_is_none(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    """Else the first prompt of all, thought to take minutes, sent those behind it elsewhere for half a minute."""
    for state in (
        a_worker("p0", "prefill", prefill_tokens_per_s=0.0),
        a_worker("d0", "decode", prefill_tokens_per_s=0.0),
    ):
        await store.register(state)
    assert (await ledger.place(a_request(cut_over_tokens=-1))).prefill == "p0"
    assert not await raw.exists("baton:load:busy:p0")


@pytest.mark.parametrize(("age_ms", "chosen"), [(0, "p1"), (120_000, "p0")])
async def test_the_ledger_is_newer_than_heartbeats_unless_it_was_lost(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis, age_ms: int, chosen: str
) -> None:
    """p0 said that it had a queue; nothing is charged to it, because that is computed or because Redis was emptied."""
    await store.register(a_worker("p0", "prefill", queued_tokens=500))
    await store.register(a_worker("p1", "prefill"))
    await store.register(a_worker("d0", "decode"))
    at_ms = await now_ms(raw)
    await raw.set("baton:load:since", at_ms - age_ms)
    assert (await ledger.place(a_request(cut_over_tokens=0))).prefill == chosen


async def test_a_worker_that_was_idle_is_known_to_the_ledger_until_that_is_lost(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    """Its heartbeat is older than the ledger from then on; after `FLUSHALL` it counts again."""
    busy = a_worker("p0", "prefill", queued_tokens=500)
    for state in (a_worker("p0", "prefill"), busy, a_worker("p1", "prefill"), a_worker("d0", "decode")):
        await store.register(state)
    assert (await ledger.place(a_request("a", cut_over_tokens=0))).prefill == "p0"
    await raw.flushall()
    for state in (busy, a_worker("p1", "prefill"), a_worker("d0", "decode")):
        await store.register(state)
    assert (await ledger.place(a_request("b", cut_over_tokens=0))).prefill == "p1"


async def test_the_prompt_being_computed_counts_less_with_time(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    """Both have two prompts; p1 began earlier."""
    for worker in ("p0", "p1"):
        await store.register(a_worker(worker, "prefill"))
    await store.register(a_worker("d0", "decode", max_sequences=50))
    at_ms = await now_ms(raw)
    await raw.set("baton:load:since", 1)
    for number, at in (("a", 0), ("b", 40), ("c", 0), ("d", 40)):
        await ledger.place(a_request(number, num_tokens=64, cut_over_tokens=0, now_ms=at_ms + at))
    assert [await ledger.charged(worker, "prefill") for worker in ("p0", "p1")] == [128, 128]
    await raw.set("baton:load:began:p0", at_ms + 80)
    await raw.set("baton:load:began:p1", at_ms + 40)
    assert (await ledger.place(a_request("e", num_tokens=64, cut_over_tokens=0, now_ms=at_ms + 90))).prefill == "p1"


async def test_a_charge_is_exact_and_given_back_once(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    placement = await ledger.place(a_request(num_tokens=50, reserve_tokens=70))
    decode = placement.decode[0]
    assert await ledger.charged(placement.prefill, "prefill") == 50
    assert await ledger.charged(decode, "decode") == 70
    for _ in range(2):
        await release(ledger, "request", 1, stage="prefill")
    assert (await ledger.charged(placement.prefill, "prefill"), await ledger.charged(decode, "decode")) == (0, 70)
    for _ in range(2):
        await release(ledger, "request", 1, stage="all")
    assert await ledger.charged(decode, "decode") == 0


async def test_a_charge_is_found_at_the_named_workers_when_its_record_was_evicted(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    placement = await ledger.place(a_request())
    await raw.delete("baton:placed:request:1")
    await release(ledger, "request", 1, stage="prefill", workers=["p0", "p1"])
    assert await ledger.charged(placement.prefill, "prefill") == 0


async def test_a_new_incarnation_starts_without_the_charges_of_the_old_one(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    await ledger.place(a_request(exclude=["p1", "d1"]))
    await store.register(a_worker("p0", "prefill", incarnation=2), ttl_ms=TTL_MS)
    assert await ledger.charged("p0", "prefill") == 0
    await release(ledger, "request", 1, stage="all")  # of the old one's: nothing happens to the new one's
    assert await ledger.charged("p0", "prefill") == 0


async def test_placing_the_same_attempt_again_charges_it_once(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    for _ in range(3):
        await ledger.place(a_request(num_tokens=50, reserve_tokens=70))
    assert [await ledger.charged(worker, "prefill") for worker in ("p0", "p1")] == [50, 0]
    assert [await ledger.charged(worker, "decode") for worker in ("d0", "d1")] == [70, 0]


async def test_a_charge_expires_with_its_deadline_and_takes_only_itself_along(
    store: FleetStore, ledger: Ledger
) -> None:
    await two_and_two(store)
    await ledger.place(a_request("short", num_tokens=50, reserve_tokens=70, deadline_ms=50, exclude=["p1", "d1"]))
    await ledger.place(a_request("long", num_tokens=5, reserve_tokens=7, exclude=["p1", "d1"]))

    async def is_expired() -> bool:
        return (await ledger.charged("p0", "prefill"), await ledger.charged("d0", "decode")) == (5, 7)

    await eventually(is_expired)


async def test_loads_spread_over_equal_workers(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    placements = [await ledger.place(a_request(f"request-{number}", now_ms=AT_MS)) for number in range(8)]
    assert Counter(placement.prefill for placement in placements) == {"p0": 4, "p1": 4}
    assert Counter(placement.decode[0] for placement in placements) == {"d0": 4, "d1": 4}


@pytest.mark.parametrize("limit", [{"max_sequences": 10}, {"free_blocks": 100}], ids=["sequences", "blocks"])
async def test_two_gateways_at_once_never_overbook_a_worker_while_another_has_room(
    store: FleetStore, ledger: Ledger, redis_url: str, limit: dict[str, int]
) -> None:
    # Room for 10 requests each: of 160 tokens in 100 blocks of 16, or 10 sequences.
    roomy = {"max_sequences": 1000} | limit
    for worker in ("d0", "d1", "d2"):
        await store.register(a_worker(worker, "decode", **roomy), ttl_ms=TTL_MS)
    await store.register(a_worker("p0", "prefill"), ttl_ms=TTL_MS)
    held = a_prompt()
    await store.announce("d0", 1, held[:1], [])  # everybody would like d0
    reserve = 160 if "free_blocks" in limit else 1
    async with connect_store(patient(redis_url)) as second:
        other = patient_ledger(second)
        placements = await asyncio.gather(
            *(
                gateway.place(
                    a_request(f"{name}-{number}", reserve_tokens=reserve, digests=held if name == "a" else [])
                )
                for number in range(15)
                for name, gateway in (("a", ledger), ("b", other))
            )
        )
        chosen = Counter(placement.decode[0] for placement in placements)
        assert chosen == {"d0": 10, "d1": 10, "d2": 10}
        assert "full" not in {placement.reason for placement in placements}
        assert (await other.place(a_request("one too many", reserve_tokens=reserve))).reason == "full"


async def test_what_a_worker_says_of_its_load_counts_when_it_is_more_than_was_charged(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    await store.register(a_worker("d0", "decode", running=7))
    await store.register(a_worker("p0", "prefill", queued_tokens=500))
    await doubt(raw, "p0")
    placement = await ledger.place(a_request())
    assert (placement.prefill, placement.decode) == ("p1", ["d1", "d0"])


async def test_many_are_given_back_by_one_call_in_any_order_and_twice_and_nobody_else_s(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    for number in range(6):
        await ledger.place(a_request(f"r{number}", num_tokens=10, reserve_tokens=20))
    first = [Charged(f"r{number}", 1, ("decode", "prefill")) for number in (3, 0)]
    wrong = [Charged("r1", 2, ("prefill", "decode"), ("p0", "p1", "d0", "d1")), Charged("r", 1, ("prefill",), ("p0",))]
    assert await ledger.release([*first, *first, *wrong, Charged("r2", 1, ("prefill",)), *first]) == 9
    workers = [(worker, stage) for stage in ("prefill", "decode") for worker in (f"{stage[0]}0", f"{stage[0]}1")]
    charged = [await ledger.charged(worker, stage) for worker, stage in workers]  # type: ignore[arg-type]
    assert (sum(charged[:2]), sum(charged[2:])) == (3 * 10, 4 * 20)
    kind = str(a_request().kind)
    for stage, of in (("prefill", workers[:2]), ("decode", workers[2:])):  # who has less comes first
        least_first = await raw.zrange(f"baton:ready:{stage}:{kind}", 0, -1)
        loads = [await ledger.charged(worker.decode(), stage) for worker in least_first]  # type: ignore[arg-type]
        assert loads == sorted(loads)
        assert len(loads) == len(of)


async def test_of_attempts_without_a_record_a_call_searches_some_and_says_how_far_it_came(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    await two_and_two(store)
    names = [f"r{number}" for number in range(30)]
    for name in names:
        await ledger.place(a_request(name, num_tokens=10))
        await raw.delete(f"baton:placed:{name}:1")
    left = [Charged(name, 1, ("prefill",), ("p0", "p1")) for name in names]
    calls = 0
    while left:
        left, calls = left[await ledger.release(left) :], calls + 1
    assert calls > 2
    assert [await ledger.charged(worker, "prefill") for worker in ("p0", "p1")] == [0, 0]


async def test_what_is_given_back_while_redis_hangs_is_given_back_when_it_goes_on(tmp_path: Path) -> None:
    async with (
        run_redis(data_dir=tmp_path) as server,
        connect_store(patient(server.url), libraries=function_libraries()) as plain,
    ):
        store, ledger = FleetStore(plain), Ledger(plain, timeout_s=0.2)
        await store.register(a_worker("w", "decode"), ttl_ms=TTL_MS)
        for number in range(20):
            await patient_ledger(plain).place(a_request(f"r{number}", num_tokens=10))
        releases = Releases(ledger)
        server.process.send_signal(signal.SIGSTOP)
        try:
            for number in range(20):
                releases.add(Charged(f"r{number}", 1, ("prefill", "decode"), ("w",)))
            await asyncio.sleep(0.3)  # the first try's time-out
            assert len(releases) == 20
        finally:
            server.process.send_signal(signal.SIGCONT)

        async def is_empty() -> bool:
            return not len(releases)

        await eventually(is_empty)
        assert await patient_ledger(plain).charged("w", "decode") == 0
        await releases.close()
