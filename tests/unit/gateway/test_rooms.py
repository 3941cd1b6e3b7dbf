"""A waiting room for each model: one model's flood is not the other's."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import UnavailableError
from common.messages import GatewayState, ModelLoad, SamplingParams, TenantPlaces
from gateway.admission.policy import RefusedError, RequestLimits
from gateway.admission.rooms import WaitingRooms
from gateway.admission.supply import Capacity, Prefiller
from gateway.admission.waiting_room import WaitingRoom
from gateway.request.spec import GenerationSpec
from gateway.tenants.tenants import ANYBODY


def spec(model: str, name: str) -> GenerationSpec:
    sampling = SamplingParams(max_tokens=4)
    return GenerationSpec(request_id=name, token_ids=[1] * 100, sampling=sampling, deadline_s=60.0, model=model)


@pytest.fixture
def rooms() -> WaitingRooms:
    """A worker of 100 tokens a second for each model; two requests of each in flight at most."""

    def room_for(model: str) -> WaitingRoom:
        capacity = Capacity(workers=(Prefiller(tokens_per_s=100.0),))
        return WaitingRoom(RequestLimits(window_s=1.0, max_requests=2, reserved=0.0), lambda: capacity)

    return WaitingRooms(room_for)


async def enter(rooms: WaitingRooms, one: GenerationSpec) -> asyncio.Task[float]:
    """A call that has come as far as it can."""
    call = asyncio.create_task(rooms.enter([one]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return call


async def test_a_model_that_is_full_makes_no_other_wait(rooms: WaitingRooms) -> None:
    await (await enter(rooms, spec("a", "a1")))
    waits = await enter(rooms, spec("a", "a2"))
    with pytest.raises(RefusedError, match="2 requests are in flight"):
        rooms.turn_away("a", ANYBODY, priority=0)
    rooms.turn_away("b", ANYBODY, priority=0)
    await (await enter(rooms, spec("b", "b1")))
    assert (waits.done(), rooms.in_flight, rooms.waiting["normal"]) == (False, 3, (1, 100))
    rooms.computed(spec("a", "a1"))
    await waits


async def test_what_is_counted_is_counted_by_model(rooms: WaitingRooms) -> None:
    for model in ("a", "b"):
        one = spec(model, model)
        await (await enter(rooms, one))
        rooms.placed(one, 30)
        rooms.computed(one)
    rooms.ended(spec("b", "b"), 7)
    assert rooms.counters("a") == {"work:default": 100}
    assert rooms.counters("b") == {"work:default": 107}
    assert [rooms.of(model).in_flight for model in ("a", "b")] == [1, 0]


async def test_other_gateways_are_told_of_each_model_and_of_the_sums(rooms: WaitingRooms) -> None:
    for model, name in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        await enter(rooms, spec(model, name))
    state = rooms.tell(GatewayState(gateway="g", incarnation=1, queued_requests=5, queued_tokens=50), [])
    assert state.models == {
        "a": ModelLoad(waiting_tokens=100, started_tokens=100, tenants={"default": TenantPlaces(held=1)}),
        "b": ModelLoad(started_tokens=100, tenants={"default": TenantPlaces(held=1)}),
    }
    assert (state.waiting_tokens, state.started_tokens) == (100, 200)
    assert (state.queued_requests, state.queued_tokens) == (6, 150)
    rooms.refuse_all(UnavailableError("the gateway is shutting down"))


async def test_a_drain_refuses_those_who_wait_for_any_model(rooms: WaitingRooms) -> None:
    calls = [await enter(rooms, spec(model, f"{model}{n}")) for model in ("a", "b") for n in range(2)]
    rooms.refuse_all(UnavailableError("the gateway is shutting down"))
    for started, waiting in (calls[:2], calls[2:]):
        await started
        with pytest.raises(UnavailableError, match="shutting down"):
            await waiting
