"""Places of the decode batch through the gateway's own parts: a stream gives its place back, and goes on where it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from common import subjects
from common.errors import DeadlineExceededError
from common.messages import Cancel, GatewayState, ModelLoad, TenantPlaces
from common.peers import DEAD_AFTER_S
from gateway.admission.supply import MIN_RUN_S
from gateway.admission.waiting_room import PROMISE_S
from gateway.request.active import ActiveRequest
from gateway.tenants.tenants import Tenant
from tests.unit.gateway.lifecycle.conftest import Gateway, answer_of

LOOK_S = 0.3
LONG, SHORT = Tenant(name="long"), Tenant(name="short")


@pytest.fixture
async def full(gateway: Gateway) -> AsyncIterator[Gateway]:
    """One decode worker with two places, both taken by one tenant: "a" and "b"."""
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        await gateway.worker(name, role, max_sequences=2)
    await gateway.requests.start()
    yield gateway
    await gateway.requests.close()


async def two_streams(gateway: Gateway) -> list[ActiveRequest]:
    streams = [await gateway.decoding(name, tenant=LONG) for name in "ab"]
    await asyncio.sleep(MIN_RUN_S)
    return streams


def submitted(gateway: Gateway, name: str, **changes: object) -> asyncio.Task[ActiveRequest]:
    return asyncio.create_task(gateway.submit(name, **changes))


async def test_who_holds_nothing_gets_a_place_and_the_stream_goes_on_afterwards(full: Gateway) -> None:
    streams = await two_streams(full)
    request = await full.submit("c", tenant=SHORT)
    await full.idle()
    [moved] = [one for one in streams if one.place.preemptions]
    name = moved.state.spec.request_id
    assert [(cancel.request_id, cancel.attempt) for cancel in full.workers["d0"].told(Cancel)] == [(name, 1)]
    assert full.jobs("p0")[-1].request_id == "c"
    assert name not in {job.request_id for job in full.jobs("p0")}  # it waits here
    assert full.requests.waiting["normal"][0] == 1
    assert full.requests.counters["preemptions"] == 1

    worker = full.workers["p0"]
    await worker.claim(request)
    worker.send(request, 0, 7, finish="stop")
    assert await answer_of(request) == [7]
    await full.idle()
    job = full.jobs("p0")[-1]
    assert (job.request_id, job.attempt) == (name, 2)
    assert job.token_ids == b"".join(token.to_bytes(4, "little") for token in moved.state.token_ids)
    await worker.claim(moved)
    worker.send(moved, 2, 102, finish="stop")
    assert await answer_of(moved) == [100, 101, 102]
    assert moved.timeline.attempts[0].outcome == "its place went to another tenant"
    assert (moved.timings["preempted"] > 0, moved.state.failed, moved.state.deaths) == (True, 0, 0)


async def test_the_same_tenant_waits_for_its_own_streams(full: Gateway) -> None:
    streams = await two_streams(full)
    waits = submitted(full, "c", tenant=LONG)
    await asyncio.sleep(LOOK_S)
    assert (waits.done(), full.requests.waiting["normal"][0]) == (False, 1)
    later = submitted(full, "d", tenant=LONG)
    await full.idle()
    [told] = full.requests.timelines.find("d")
    assert (told.status, told.ahead) == ("waiting", 1)
    later.cancel()
    assert full.workers["d0"].told(Cancel) == []
    full.workers["d0"].send(streams[0], 2, 102, finish="stop")
    assert (await waits).state.assigned == "p0"


async def test_a_stream_that_waits_for_its_place_ends_at_its_deadline(full: Gateway) -> None:
    streams = [await full.decoding(name, tenant=LONG, deadline_s=5.0) for name in "ab"]
    await asyncio.sleep(MIN_RUN_S)
    await full.submit("c", tenant=SHORT)
    [moved] = [one for one in streams if one.place.preemptions]
    with pytest.raises(DeadlineExceededError):
        await answer_of(moved)
    await full.idle()
    assert full.requests.waiting["normal"] == (0, 0)
    assert moved.state.attempt == 1


async def test_a_client_that_leaves_while_its_stream_waits_leaves_nothing(full: Gateway) -> None:
    streams = await two_streams(full)
    await full.submit("c", tenant=SHORT)
    [moved] = [one for one in streams if one.place.preemptions]
    await full.idle()
    moved.cancel("the client left")
    await full.idle()
    assert (full.requests.in_flight, full.requests.waiting["normal"]) == (2, (0, 0))


async def test_somebody_gives_way_for_a_request_that_finds_every_decode_worker_full(full: Gateway) -> None:
    """Blocks may be short where places are not, and other gateways start requests, too."""
    await full.workers["d0"].beat(max_sequences=3)
    await asyncio.sleep(LOOK_S)
    streams = await two_streams(full)
    request, worker = await full.submit("c", tenant=SHORT), full.workers["p0"]
    await worker.claim(request)
    worker.knows.add("c")
    worker.is_out_of_room = True
    worker.send(request, 0, 7)
    await asyncio.sleep(2 * LOOK_S + 0.5)
    assert [one.place.preemptions for one in streams].count(1) == 1
    assert request.place.preemptions == 0


async def test_a_stream_gives_way_for_a_tenant_at_another_gateway_and_its_place_is_left_to_it(full: Gateway) -> None:
    streams = await two_streams(full)

    async def tell(**places: TenantPlaces) -> None:
        load = {"": ModelLoad(tenants=places)}
        await full.bus.publish(
            subjects.gateway_heartbeat("there"), GatewayState(gateway="there", incarnation=1, models=load)
        )

    await tell(short=TenantPlaces(waiting=1))
    await asyncio.sleep(LOOK_S)
    assert sum(one.place.preemptions for one in streams) == 1
    assert full.requests.waiting["normal"][0] == 1  # there is a place, and it is not for this one
    await tell(short=TenantPlaces(held=1))
    await asyncio.sleep(PROMISE_S - LOOK_S)
    assert full.requests.waiting["normal"][0] == 1
    await tell()
    await asyncio.sleep(2 * LOOK_S)
    assert full.requests.waiting["normal"][0] == 0


async def test_a_drain_ends_streams_that_wait_for_their_places(full: Gateway) -> None:
    await two_streams(full)
    await full.submit("c", tenant=SHORT)
    await full.requests.drain(0.5)
    assert full.requests.in_flight == 0


async def test_a_lost_worker_and_a_preemption_at_once_lose_no_stream(full: Gateway) -> None:
    streams = await two_streams(full)
    await full.submit("c", tenant=SHORT)
    d0 = full.workers["d0"]
    await d0.die()
    await full.worker("d0", "decode", incarnation=2, max_sequences=2)
    await asyncio.sleep(DEAD_AFTER_S)
    assert not any(one.state.is_over for one in streams)
    assert sorted({job.request_id for job in full.jobs("p0")}) in (["a", "c"], ["b", "c"])


async def test_planners_hear_that_decode_workers_are_short(full: Gateway) -> None:
    await two_streams(full)
    waits = submitted(full, "c", tenant=LONG)
    await asyncio.sleep(1.5)
    [*_, last] = [state for _, state in full.bus.published if isinstance(state, GatewayState)]
    assert (last.handing_over, last.queued_requests, last.queued_tokens) == (1, 0, 0)
    waits.cancel()


async def test_a_stream_that_returned_leaves_the_window_with_its_next_token(gateway: Gateway) -> None:
    """Else nobody starts behind it until it ends, and it counts as a prompt to be computed."""
    await gateway.worker("p0", "prefill", max_sequences=4)
    await gateway.worker("d0", "decode", max_sequences=4)
    await gateway.requests.start()
    for name in "abcd":
        await gateway.decoding(name, tenant=LONG, token_ids=[1] * 900)
    await asyncio.sleep(MIN_RUN_S)
    streams = list(gateway.requests.seen.running)
    request = await gateway.submit("e", tenant=SHORT)
    [moved] = [one for one in streams if one.place.preemptions]
    p0, d0 = gateway.workers["p0"], gateway.workers["d0"]
    await p0.claim(request)
    p0.send(request, 0, 7, finish="stop")
    await gateway.idle()
    assert moved.state.attempt == 2
    await p0.claim(moved)
    p0.send(moved, 2, 102)
    d0.send(moved, 3, 103)
    for one in streams:
        if one is not moved:
            d0.send(one, 2, 102, finish="stop")
    await gateway.idle()
    state = gateway.requests.rooms.tell(GatewayState(gateway="here", incarnation=1), gateway.requests.seen.running)
    assert state.started_tokens == 0
    names = [submitted(gateway, name, tenant=SHORT, token_ids=[1] * 10) for name in "fg"]
    await gateway.idle()
    assert all(one.done() for one in names)
    assert gateway.requests.counters["work:long"] == 4 * 900 + 3 * 3  # each prompt once, and what has ended
    await gateway.requests.close()
