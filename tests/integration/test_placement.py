"""What the choice weighs: queues, prefixes, steps, handoffs, and prompts on decode workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import redis.asyncio

from common.errors import UnavailableError
from common.messages import SamplingParams
from common.messages.jobs import NEEDED
from common.peers import Peers
from common.policy import placement_policy
from gateway.placement.agreement import Agreement
from gateway.placement.ledger import Ledger, PlacementRequest
from gateway.placement.placer import Placer
from gateway.request.placement import Charged, Placement, Reason
from gateway.request.spec import GenerationSpec
from gateway.request.state import RequestState
from tests.integration.fleet import (
    AT_MS,
    TTL_MS,
    FleetStore,
    a_prompt,
    a_request,
    a_worker,
    doubt,
    now_ms,
    release,
    two_and_two,
)


async def test_a_long_queue_outweighs_a_prefix(store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    await store.announce("p0", 1, prompt, [])
    await store.register(a_worker("p0", "prefill", queued_tokens=1000))
    await doubt(raw, "p0")
    assert (await ledger.place(a_request(digests=prompt))).prefill == "p1"


@pytest.mark.parametrize("asked", [{"min_p": 0.1}, {"typical_p": 0.9}, {}])
async def test_redis_and_the_gateway_choose_among_workers_with_what_a_request_needs(
    store: FleetStore, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, asked: dict[str, float]
) -> None:
    """Also of a feature that nobody thought of: both rules know no feature's name."""
    monkeypatch.setitem(NEEDED, "made up", lambda work: work.sampling.min_p > 0)
    peers = Peers(clock=lambda: 0.0)
    for role in ("prefill", "decode"):
        for name, features in (("lacks", {"grammars"}), ("has", {"made up", "typical_p"})):
            # `queued_tokens` make the worker without the feature the cheaper one.
            state = a_worker(f"{role}-{name}", role, queued_tokens=900 * (name == "has"), features=frozenset(features))
            peers.saw(state)
            await store.register(state)
    spec = GenerationSpec(
        request_id="r", token_ids=[1] * 64, sampling=SamplingParams(max_tokens=8, **asked), deadline_s=60
    )
    chosen = []
    for of in (ledger, NoStore()):
        placer = Placer(store=of, agreement=Agreement(peers), cut_over_tokens=0)
        placement = await placer.place(RequestState(spec=spec, deadline_at=1e12), [])
        chosen.append((placement.prefill, set(placement.decode)))
    needed = "has" if asked else "lacks"
    decoders = {"decode-has"} if asked else {"decode-has", "decode-lacks"}
    assert chosen == [(f"prefill-{needed}", decoders)] * 2


class NoStore:
    """Redis is away."""

    async def place(self, request: PlacementRequest) -> Placement:
        raise UnavailableError("Redis is away")

    async def release(self, charges: Sequence[Charged]) -> int:
        return len(charges)


async def test_the_faster_worker_takes_the_longer_queue(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    await store.register(a_worker("p0", "prefill", prefill_tokens_per_s=8000.0))
    requests = [a_request(f"request-{number}", now_ms=AT_MS) for number in range(24)]
    chosen = Counter([(await ledger.place(request)).prefill for request in requests])
    assert chosen == {"p0": 23, "p1": 1}


async def test_who_has_measured_nothing_is_not_taken_for_faster_than_the_others(
    store: FleetStore, ledger: Ledger
) -> None:
    """A worker without a request so far must not win by a fixed cost that it doesn't know yet."""
    await two_and_two(store)
    prompt = a_prompt()
    await store.register(a_worker("p0", "prefill", prefill_fixed_ms=100.0))
    await store.register(a_worker("p1", "prefill", prefill_tokens_per_s=0.0))
    await store.announce("p0", 1, prompt[:2], [])
    assert (await ledger.place(a_request(digests=prompt))).prefill == "p0"


async def test_a_short_uncached_rest_is_prefilled_on_the_decode_worker(store: FleetStore, ledger: Ledger) -> None:
    await two_and_two(store)
    prompt = a_prompt()
    assert (await ledger.place(a_request("long", digests=prompt, cut_over_tokens=20))).reason == "load"
    await store.announce("d1", 1, prompt[:3], [])
    placement = await ledger.place(a_request("short", digests=prompt, cut_over_tokens=20))
    assert placement == Placement(
        prefill="d1",
        decode=[],
        prefill_incarnation=1,
        matched_blocks_prefill=3,
        matched_blocks_decode=3,
        reason=Reason.LOCAL_SHORT,
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "num_tokens", "reason"),
    [
        ({}, {}, 48, "local: earlier"),  # nobody decodes there: the handoff is spared
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
    store: FleetStore, ledger: Ledger, prefill: dict[str, Any], decode: dict[str, Any], num_tokens: int, reason: str
) -> None:
    await store.register(a_worker("p0", "prefill", **prefill))
    await store.register(a_worker("d0", "decode", **({"prefill_tokens_per_s": 0.0} | decode)))
    placement = await ledger.place(a_request(num_tokens=num_tokens, cut_over_tokens=-1))
    assert (placement.reason, placement.prefill) == (reason, "d0" if reason.startswith("local") else "p0")


@pytest.mark.parametrize(
    ("share", "age_ms", "reason"), [(0.5, 0, "load"), (1.0, 0, "local: earlier"), (1.0, 60_000, "load")]
)
async def test_a_busy_prefill_worker_is_spared_for_those_who_come_next(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis, share: float, age_ms: int, reason: str
) -> None:
    """What is idle at the moment, but was given work for most of the last seconds, will have a queue again."""
    for state in (a_worker("p0", "prefill"), a_worker("d0", "decode", prefill_tokens_per_s=0.0)):
        await store.register(state)
    at_ms = await now_ms(raw)
    await raw.hset("baton:load:busy:p0", mapping={"share": share, "at": at_ms - age_ms})
    placement = await ledger.place(a_request(num_tokens=64, cut_over_tokens=-1))
    assert placement.reason == reason
    assert (placement.costs["crowding_ms"] > 0) == (reason != "load")


async def test_a_queue_takes_its_passes_fixed_parts_too(store: FleetStore, ledger: Ledger) -> None:
    await store.register(a_worker("p0", "prefill", prefill_fixed_ms=100.0))
    await store.register(a_worker("d0", "decode"))
    await ledger.place(a_request("first", num_tokens=500, now_ms=AT_MS))
    placement = await ledger.place(a_request("second", num_tokens=48, now_ms=AT_MS))
    assert placement.costs["prefill_ms"] == pytest.approx(100 + 500 + 100 + 48, abs=1)


async def test_no_figure_is_told_where_nobody_measured_anything(store: FleetStore, ledger: Ledger) -> None:
    await store.register(a_worker("p0", "prefill", prefill_tokens_per_s=0.0))
    await store.register(a_worker("d0", "decode", prefill_tokens_per_s=0.0))
    placement = await ledger.place(a_request(num_tokens=48, cut_over_tokens=-1))
    assert (placement.reason, placement.costs["predicted_ms"], placement.costs["prefill_ms"]) == ("load", -1, -1)


async def test_a_burst_is_shared_between_prefill_and_decode_workers(store: FleetStore, ledger: Ledger) -> None:
    """Each prompt is charged where it is computed, so the next one sees it, whichever gateway places it."""
    await store.register(a_worker("p0", "prefill"))
    await store.register(a_worker("d0", "decode", running=1, local_tokens_per_s=500.0, max_sequences=50))
    requests = [a_request(f"r{number}", num_tokens=16, cut_over_tokens=-1, now_ms=AT_MS) for number in range(12)]
    chosen = Counter([(await ledger.place(request)).prefill for request in requests])
    assert chosen == {"p0": 9, "d0": 3}


async def test_a_long_prompt_is_not_computed_where_many_would_wait_for_it(store: FleetStore, ledger: Ledger) -> None:
    """Two seconds of queue are no reason to stop eight sequences for one."""
    await store.register(a_worker("p0", "prefill", queued_tokens=2000))
    await store.register(a_worker("d0", "decode", running=8, max_sequences=50, local_tokens_per_s=900.0))
    assert (await ledger.place(a_request("long", num_tokens=1000, cut_over_tokens=-1))).reason == "load"
    assert (await ledger.place(a_request("short", num_tokens=100, cut_over_tokens=-1))).reason == "local: earlier"


async def test_a_rate_measured_beside_decoding_stands_for_the_one_that_nobody_has(
    store: FleetStore, ledger: Ledger
) -> None:
    """Without any prefill rate the prefill worker is taken for as fast as that, not for one token a second."""
    await store.register(a_worker("p0", "prefill", prefill_tokens_per_s=0.0))
    await store.register(a_worker("d0", "decode", running=1, prefill_tokens_per_s=0.0, local_tokens_per_s=500.0))
    placement = await ledger.place(a_request(cut_over_tokens=-1))
    assert (placement.reason, placement.costs["prefill_ms"]) == ("load", 128.0)


async def test_the_compared_costs_come_with_the_answer(store: FleetStore, ledger: Ledger) -> None:
    await store.register(a_worker("p0", "prefill", queued_tokens=100, prefill_fixed_ms=1.0))
    await store.register(a_worker("d0", "decode", running=1, local_tokens_per_s=500.0, decode_step_ms=7.0))
    placement = await ledger.place(a_request(num_tokens=20, cut_over_tokens=-1))
    assert placement.reason == "local: earlier"
    assert placement.costs == {
        "predicted_ms": 47.0,
        "prefill_ms": 121.0,
        "local_ms": 47.0,
        "transfer_ms": 2.0,
        "crowding_ms": 0.0,
        "matched_tokens": 0,
        "loading_ms": 0.0,
        "candidates": 2,
    }


async def test_a_worker_with_both_roles_serves_alone(store: FleetStore, ledger: Ledger) -> None:
    await store.register(a_worker("w", "prefill", "decode"))
    placement = await ledger.place(a_request())
    assert (placement.prefill, placement.decode, placement.reason) == ("w", [], "local: same worker")


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
    store: FleetStore, ledger: Ledger, d0: dict[str, Any], d1: dict[str, Any], chosen: str
) -> None:
    await store.register(a_worker("p0", "prefill"))
    await store.register(a_worker("d0", "decode", **d0))
    await store.register(a_worker("d1", "decode", **d1))
    assert (await ledger.place(a_request())).decode[0] == chosen


async def test_what_the_prefill_does_not_hide_of_the_hand_over_decides_between_decode_workers(
    store: FleetStore, ledger: Ledger
) -> None:
    """A slow link makes the holder of the prefix the better place, although its step is longer."""
    prompt = a_prompt()
    for link, chosen in ((1e9, "d0"), (1e3, "d1")):
        await store.register(a_worker("p0", "prefill", link_bytes_per_s=link))
        await store.register(a_worker("d0", "decode", running=1, decode_step_ms=8.0))
        await store.register(a_worker("d1", "decode", running=1, decode_step_ms=12.0))
        await store.announce("d1", 1, prompt, [])
        placement = await ledger.place(a_request(f"{link}", digests=prompt))
        assert placement.decode[0] == chosen
        await release(ledger, f"{link}", 1, stage="all")


async def test_a_call_reads_a_bounded_number_of_workers(
    store: FleetStore, ledger: Ledger, raw: redis.asyncio.Redis
) -> None:
    """However many of the least loaded can't be chosen: the gateway then chooses by heartbeats."""
    most = int(placement_policy()["candidates"]["max_read"])
    await store.register(a_worker("d0", "decode"), ttl_ms=TTL_MS)
    for number in range(2 * most):
        await store.register(a_worker(f"other-{number}", "prefill", v=9), ttl_ms=TTL_MS)
    await store.register(a_worker("p0", "prefill", queued_tokens=100), ttl_ms=TTL_MS)
    await raw.config_resetstat()
    assert (await ledger.place(a_request())).reason is Reason.LOCAL_NO_PREFILL
    reads = (await raw.info("commandstats"))["cmdstat_hmget"]["calls"]
    assert reads <= most + int(placement_policy()["candidates"]["per_role"]) + 1
