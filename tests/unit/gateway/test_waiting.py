"""Callers that wait for their start: who leaves, who is sent away, and what is cached."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.errors import UnavailableError
from common.messages import Goal, ModelLoad, SamplingParams, TenantPlaces
from gateway.admission.policy import RefusedError, RequestLimits
from gateway.admission.supply import Capacity, Prefiller
from gateway.admission.waiting_room import CAPACITY_FOR_S, WaitingRoom
from gateway.placement.placer import RecentPrefixes
from gateway.request.spec import Aim, GenerationSpec
from gateway.tenants.tenants import ANYBODY


def spec(name: str, *, tokens: int = 100, priority: int = 0, deadline_s: float = 60.0) -> GenerationSpec:
    return GenerationSpec(
        request_id=name,
        token_ids=[1] * tokens,
        sampling=SamplingParams(max_tokens=4),
        deadline_s=deadline_s,
        priority=priority,
    )


class Fleet:
    """One worker of 100 tokens a second."""

    queued = 0

    def __call__(self) -> Capacity:
        return Capacity(workers=(Prefiller(tokens_per_s=100.0, queued_tokens=self.queued),))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


class Clock:
    """Stands still until it is told to go on."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def room(fleet: Fleet, clock: Clock) -> WaitingRoom:
    return WaitingRoom(RequestLimits(window_s=1.0), fleet, clock=clock)


async def enter(room: WaitingRoom, *specs: GenerationSpec) -> asyncio.Task[float]:
    """A call that has come as far as it can."""
    call = asyncio.create_task(room.enter(specs))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return call


async def test_who_waits_starts_when_a_first_token_came(room: WaitingRoom) -> None:
    first = spec("first")
    assert await (await enter(room, first)) >= 0
    second, third = await enter(room, spec("second")), await enter(room, spec("third", priority=1))
    assert room.waiting == {"low": (0, 0), "normal": (1, 100), "high": (0, 0)}  # a reserve is for the third
    assert third.done()
    room.computed(first)
    assert not second.done()  # the third has the window now
    room.ended(spec("third"), 4)
    await second
    assert room.in_flight == 2
    assert room.work == {"default": 104}


async def test_all_choices_start_together(room: WaitingRoom) -> None:
    await (await enter(room, spec("first")))
    both = await enter(room, spec("a"), spec("b"))
    assert room.waiting["normal"] == (2, 200)
    room.ended(spec("first"), 0)
    await both
    assert room.in_flight == 2


async def test_a_caller_that_leaves_gives_its_place_up(room: WaitingRoom) -> None:
    await (await enter(room, spec("first")))
    waits, next_one = await enter(room, spec("waits")), await enter(room, spec("next"))
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert room.waiting["normal"] == (1, 100)
    room.ended(spec("first"), 0)
    await next_one
    assert room.in_flight == 1


async def test_a_caller_that_leaves_as_it_starts_holds_nothing(room: WaitingRoom) -> None:
    await (await enter(room, spec("first")))
    waits, next_one = await enter(room, spec("waits")), await enter(room, spec("next"))
    room.ended(spec("first"), 0)  # it may start, and has not run yet
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    await next_one
    assert room.in_flight == 1


async def test_a_drain_answers_all_who_wait(room: WaitingRoom) -> None:
    await (await enter(room, spec("first")))
    calls = [await enter(room, spec(f"r{index}")) for index in range(3)]
    room.refuse_all(UnavailableError("the gateway is shutting down"))
    for call in calls:
        with pytest.raises(UnavailableError, match="shutting down"):
            await call
    assert (room.in_flight, room.waiting["normal"]) == (1, (0, 0))


async def test_who_can_t_be_in_time_any_more_is_sent_away(room: WaitingRoom, fleet: Fleet, clock: Clock) -> None:
    await (await enter(room, spec("first")))
    waits = await enter(room, spec("waits", deadline_s=5.0))
    patient = await enter(room, spec("patient"))
    fleet.queued = 1000
    room.look_again()
    assert not waits.done()  # what was seen last is still fresh
    clock.now += 2 * CAPACITY_FOR_S
    room.look_again()
    with pytest.raises(RefusedError, match="the first token would come in"):
        await waits
    assert not patient.done()
    assert room.refused == {"deadline": 1}


async def test_who_needs_its_goal_is_refused_rather_than_late(room: WaitingRoom, fleet: Fleet) -> None:
    fleet.queued = 300  # three seconds
    goal = Goal(ttft_ms=2000.0, ttft_ms_per_token=20.0)
    await (await enter(room, replace(spec("wants"), aim=Aim(goal))))  # it is only late
    with pytest.raises(RefusedError, match="too late for its goal"):
        await room.enter([replace(spec("needs"), aim=Aim(goal, is_needed=True))])
    assert room.refused == {"goal": 1}


async def test_who_is_turned_away_would_be_refused_however_short(room: WaitingRoom, fleet: Fleet) -> None:
    room.turn_away(ANYBODY, priority=0, first_token_s=1.0)
    fleet.queued = 300  # three seconds
    later = WaitingRoom(RequestLimits(window_s=1.0), fleet)
    later.turn_away(ANYBODY, priority=0)  # it may have all the time there is
    with pytest.raises(RefusedError, match="the first token would come in"):
        later.turn_away(ANYBODY, priority=0, first_token_s=2.9)
    full = WaitingRoom(RequestLimits(max_requests=1, reserved=0.0), fleet)
    await (await enter(full, spec("only")))
    with pytest.raises(RefusedError, match="requests are in flight"):
        full.turn_away(ANYBODY, priority=100)
    assert (later.refused, full.refused) == ({"deadline": 1}, {"requests": 1})


async def test_who_is_let_in_has_time_to_spare(room: WaitingRoom, fleet: Fleet, clock: Clock) -> None:
    """What is predicted for it may become a little later, and it is served all the same."""
    await (await enter(room, spec("first")))
    refused = await enter(room, spec("tight", deadline_s=2.1))  # 2 s and half of what is to spare
    with pytest.raises(RefusedError):
        await refused
    waiting = await enter(room, spec("spare", deadline_s=2.4))
    fleet.queued = 120
    clock.now += 2 * CAPACITY_FOR_S
    room.look_again()
    assert not waiting.done()
    room.computed(spec("first"))
    await waiting


async def test_what_is_cached_is_no_work(fleet: Fleet) -> None:
    room = WaitingRoom(RequestLimits(window_s=1.0), fleet, work=lambda spec: 10)
    await (await enter(room, spec("first")))
    waits = await enter(room, spec("waits", tokens=100_000, deadline_s=5.0))
    assert room.waiting["normal"] == (1, 10)
    room.placed(spec("first"), 20)  # its prefix was found
    told = ModelLoad(waiting_tokens=10, started_tokens=20, tenants={"default": TenantPlaces(held=1)})
    assert (room.queued_requests, room.load([])) == (1, told)
    room.pump()
    await waits


def test_recent_prefixes_are_bounded_and_beginnings_stay_longest() -> None:
    recent = RecentPrefixes(max_blocks=6)
    first, second = [bytes([1, n]) for n in range(4)], [bytes([2, n]) for n in range(4)]
    recent.remember(first)
    assert (recent.matched(first), recent.matched(second), recent.matched([])) == (4, 0, 0)
    recent.remember(second)
    assert (recent.matched(first), recent.matched(second)) == (2, 4)
    recent.remember(first[:1])
    recent.remember([bytes([3, n]) for n in range(5)])
    assert recent.matched(first) == 1
