"""Places of the decode batch: who gets the next one, who gives one back, and that this comes to rest."""

from __future__ import annotations

import asyncio
import random

import pytest

from common.messages import SamplingParams, TenantPlaces
from gateway.admission.policy import RequestLimits
from gateway.admission.queue import HIGH
from gateway.admission.supply import MIN_RUN_S, RUN_PER_RETURN, Capacity, Held, Holder, Newcomer, Places, Prefiller
from gateway.admission.waiting_room import WaitingRoom
from gateway.request.active import ActiveRequest
from gateway.request.spec import GenerationSpec, Origin
from gateway.request.state import RequestState
from gateway.tenants.tenants import Tenant

EIGHT = Places(total=8)


def held(**tenants: int) -> Held:
    found = Held()
    for name, amount in tenants.items():
        found.count(1, name, 1.0, amount)
    return found


def holders(tenant: str, count: int, *, tier: int = 1, **facts: object) -> list[Holder]:
    known: dict[str, object] = {"ran_s": MIN_RUN_S} | facts
    return [Holder(request_id=f"{tenant}{n}", tenant=tenant, tier=tier, **known) for n in range(count)]  # type: ignore[arg-type]


# -- whose place -----------------------------------------------------------------------------------------------------------


def test_who_holds_nothing_takes_a_place_of_who_holds_all() -> None:
    victim = EIGHT.victim(Newcomer(tenant="b"), holders("a", 8), held(a=8))
    assert victim is not None
    assert victim.tenant == "a"


def test_equal_shares_are_left_alone() -> None:
    both = [*holders("a", 4), *holders("b", 4)]
    assert EIGHT.victim(Newcomer(tenant="b"), both, held(a=4, b=4)) is None
    assert EIGHT.victim(Newcomer(tenant="a"), both, held(a=4, b=4)) is None
    assert EIGHT.victim(Newcomer(tenant="a"), holders("a", 8), held(a=8)) is None  # nobody takes his own


def test_weights_say_what_is_equal() -> None:
    now = Held()
    now.count(1, "a", 3.0, 6)
    now.count(1, "b", 1.0, 2)
    heavy = [Holder(request_id="a", tenant="a", weight=3.0, ran_s=9.0)]
    assert EIGHT.victim(Newcomer(tenant="b"), heavy, now) is None
    now.count(1, "b", 1.0, -1)
    now.count(1, "a", 3.0, 1)
    assert EIGHT.victim(Newcomer(tenant="b"), heavy, now) is not None  # 7 to 1: 6 to 2 are their shares


def test_places_at_other_gateways_count() -> None:
    places = Places(total=8, others=({"b": TenantPlaces(held=3)}, {"b": TenantPlaces(held=1)}))
    assert places.victim(Newcomer(tenant="b"), holders("a", 4), held(a=4)) is None
    assert places.free(held(a=4), 0) == 0


def test_a_sequence_runs_for_a_while_before_it_gives_way() -> None:
    claim, now = Newcomer(tenant="b"), held(a=8)
    assert EIGHT.victim(claim, holders("a", 8, ran_s=MIN_RUN_S - 0.1), now) is None
    assert EIGHT.victim(claim, holders("a", 8, return_s=1.0), now) is None  # its return was dear
    assert EIGHT.victim(claim, holders("a", 8, return_s=1.0, ran_s=RUN_PER_RETURN), now) is not None
    assert EIGHT.victim(claim, holders("a", 8, waits=True, ran_s=0.0), now) is not None  # it has no place yet


def test_who_was_spared_so_far_gives_way_first() -> None:
    often, never = holders("a", 7, preemptions=2), holders("x", 1)
    spared = Holder(request_id="spared", tenant="a", preemptions=1, ran_s=100.0)
    victim = EIGHT.victim(Newcomer(tenant="b"), [*often, spared, *never], held(a=8, x=1))
    assert victim is spared


def test_higher_tiers_take_places_of_lower_ones_down_to_a_floor() -> None:
    now = Held()
    now.count(1, "a", 1.0, 8)
    urgent = Newcomer(tenant="a", tier=HIGH)  # its own tenant's, too
    taken = 0
    while EIGHT.victim(urgent, holders("a", 8 - taken), now) is not None:
        now.count(1, "a", 1.0, -1)
        now.count(HIGH, "a", 1.0, 1)
        taken += 1
    assert taken == 8 - EIGHT.floor == 7
    assert EIGHT.victim(Newcomer(tenant="z"), holders("a", 7, tier=HIGH), now) is None  # the floor is held
    now.count(1, "a", 1.0, -1)
    assert EIGHT.victim(Newcomer(tenant="z"), holders("a", 7, tier=HIGH), now) is not None  # nothing starves


@pytest.mark.parametrize(("total", "floor"), [(0, 0), (1, 0), (2, 1), (8, 1), (30, 3)])
def test_a_floor_never_is_everything(total: int, floor: int) -> None:
    assert Places(total=total).floor == floor


def test_large_fleets_compute_some_prompts_ahead() -> None:
    assert Places(total=256).free(held(a=256), computing=100) == 16
    assert Places(total=256).free(held(a=256), computing=3) == 3
    assert Places(total=8).free(held(a=8), computing=8) == 0


def test_who_is_owed_a_place_is_not_told_to_come_back() -> None:
    assert EIGHT.is_owed(Newcomer(tenant="b"), held(a=8))
    assert not EIGHT.is_owed(Newcomer(tenant="a"), held(a=8))


def test_one_gateway_gives_way_for_who_waits_at_another() -> None:
    others = ({"a": TenantPlaces(held=3), "b": TenantPlaces(waiting=2, tier=HIGH, weight=2.0)}, {})
    places = Places(total=8, others=others)
    assert places.newcomers() == [Newcomer(tenant="b", tier=HIGH, weight=2.0)]
    assert [places.holds_most("a", held(a=amount)) for amount in (2, 3, 5)] == [False, True, True]


# -- the room, with seeds ------------------------------------------------------------------------------------------------


class Hall:
    """A waiting room in front of a few places; what is started runs until its time is over. Time goes in steps."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.now = 0.0
        self.places = chance.randint(1, 8)
        self.running: dict[str, ActiveRequest] = {}
        self.left: dict[str, float] = {}  # seconds still to run, by id
        self.arrived: dict[str, float] = {}
        self.tenants = [Tenant(name=name, weight=chance.choice([1.0, 1.0, 3.0])) for name in "abc"]
        self.room = WaitingRoom(
            RequestLimits(reserved=0.0),
            lambda: Capacity(workers=(Prefiller(),), places=Places(total=self.places)),
            started=lambda: self.running.values(),
            preempt=self.preempt,
            clock=lambda: self.now,
        )
        self.preempted = 0

    def preempt(self, request: ActiveRequest, until: object) -> None:
        request.place.preemptions += 1
        request.place.lost()
        self.preempted += 1
        assert until is not None
        until.add_done_callback(lambda _: self.returns(request))  # type: ignore[attr-defined]

    def returns(self, request: ActiveRequest) -> None:
        request.place.returns_at = self.now
        request.place.decodes(self.now)
        self.room.computed(request.state.spec, is_first=False)

    async def arrive(self, name: str, *, priority: int | None = None, lasts_s: float = 0.0) -> None:
        chance = self.chance
        spec = GenerationSpec(
            request_id=name, token_ids=[1], sampling=SamplingParams(max_tokens=9), deadline_s=1e6,
            origin=Origin(chance.choice(self.tenants)),
            priority=chance.choice([0, 0, 0, 1, -1]) if priority is None else priority,
        )  # fmt: skip
        self.left[name], self.arrived[name] = lasts_s or chance.choice([0.3, 2.0, 8.0]), self.now
        await self.room.enter([spec])
        state = RequestState(spec=spec, deadline_at=1e6)
        state.begin_attempt(self.now)
        request = self.running[name] = ActiveRequest(state, self.now, _no_cancel)
        request.place.decodes(self.now)
        self.room.computed(spec)

    def step(self, seconds: float) -> None:
        """Who decodes comes further; who is through leaves."""
        self.now += seconds
        decoding = [one for one in self.running.values() if one.place.since is not None]
        assert len(decoding) <= self.places
        for one in decoding:
            name = one.state.spec.request_id
            self.left[name] -= seconds
            if self.left[name] <= 0:
                del self.running[name]
                self.room.ended(one.state.spec, 9)
        self.room.look_again()


async def _no_cancel(request: ActiveRequest, reason: str) -> None: ...


async def test_everybody_is_served_whoever_takes_whose_place() -> None:
    preempted = 0
    for seed in range(12):
        hall, calls = Hall(seed), []
        for number in range(20):
            calls.append(asyncio.create_task(hall.arrive(f"r{number}")))
            for _ in range(3):
                await asyncio.sleep(0)
            hall.step(hall.chance.choice([0.0, 0.1, 1.0]))
        steps = 0
        while hall.running or not all(call.done() for call in calls):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            hall.step(0.1)
            steps += 1
            assert steps < 20_000, f"seed {seed}: somebody waits for ever"
        assert (hall.room.in_flight, hall.room.waiting["normal"]) == (0, (0, 0))
        preempted += hall.preempted
    assert preempted > 12, "nobody gave way: this shows nothing"


async def test_credit_of_a_lower_tier_keeps_no_higher_one_from_taking_places() -> None:
    """Those who gave way wait and earn it, and have nobody to take a place from."""
    hall = Hall(0)
    hall.places, hall.tenants = 15, hall.tenants[:1]
    low = [asyncio.create_task(hall.arrive(f"low{n}", priority=-1, lasts_s=1e6)) for n in range(15)]
    await asyncio.gather(*low)
    for number in range(13):  # the floor is 2
        hall.step(MIN_RUN_S + 0.5)
        high = asyncio.create_task(hall.arrive(f"high{number}", priority=1, lasts_s=1e6))
        for _ in range(5):
            await asyncio.sleep(0)
        assert high.done(), f"after {hall.preempted} others"
    assert hall.preempted == 13
