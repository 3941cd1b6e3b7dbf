"""When a worker gives requests up: their gateway is gone, or it is cut off itself."""

from __future__ import annotations

import pytest

from common.messages import GatewayState
from tests.fakes.bus import MemoryBus
from tests.fakes.role import NotingRole
from worker.fencing import FENCE_AFTER_S, GATEWAY_SILENT_S, Fencing, GatewayTable, Heard
from worker.identity import Identity
from worker.roles import CancelReason, Roles


def beat(gateway: str, incarnation: int = 1) -> GatewayState:
    return GatewayState(gateway=gateway, incarnation=incarnation)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
def role() -> NotingRole:
    return NotingRole("decode")


@pytest.fixture
def fencing(bus: MemoryBus, role: NotingRole, clock: Clock) -> Fencing:
    roles = Roles(hands_over=True)
    roles.attach(role, active=False)  # one that retires has requests, too
    return Fencing(bus=bus, roles=roles, identity=Identity("w", 1), clock=clock)


@pytest.mark.parametrize(
    ("incarnations", "heard"),
    [
        ([5], [Heard.NEW]),
        ([5, 5], [Heard.NEW, Heard.KNOWN]),
        ([5, 6, 6], [Heard.NEW, Heard.REPLACED, Heard.KNOWN]),
        ([5, 6, 5, 6, 7], [Heard.NEW, Heard.REPLACED, Heard.CONTESTED, Heard.CONTESTED, Heard.REPLACED]),
    ],
)
def test_a_gateway_with_another_incarnation_took_the_place_of_the_one_before(
    incarnations: list[int], heard: list[Heard]
) -> None:
    table = GatewayTable()
    assert [table.saw("gw", incarnation, 0.0) for incarnation in incarnations] == heard


def test_the_first_heartbeat_after_a_claimed_job_replaces_nobody() -> None:
    table = GatewayTable()
    table.expect("gw", 0.0)
    assert table.saw("gw", 5, 1.0) is Heard.KNOWN


def test_a_gateway_that_claimed_is_waited_for_as_long_as_one_that_was_heard() -> None:
    table = GatewayTable()
    table.expect("claimed", 0.0)
    table.saw("heard", 1, 1.0)
    table.expect("heard", 4.0)  # a job is no heartbeat
    assert table.forget_silent(GATEWAY_SILENT_S) == []
    assert table.forget_silent(GATEWAY_SILENT_S + 0.1) == ["claimed"]
    assert table.forget_silent(GATEWAY_SILENT_S + 1.1) == ["heard"]
    assert table.forget_silent(1000.0) == []


async def test_requests_of_a_silent_gateway_are_given_up_once(fencing: Fencing, role: NotingRole, clock: Clock) -> None:
    fencing.saw(beat("gw"))
    clock.now += GATEWAY_SILENT_S
    await fencing.watch()
    assert role.cancelled == []
    clock.now += 0.1
    await fencing.watch()
    await fencing.watch()
    assert role.cancelled == [(CancelReason.GATEWAY_LOST, "gw")]
    assert fencing.saw(beat("gw")) is Heard.NEW


async def test_a_worker_without_the_bus_gives_everything_up_before_others_give_it_away(
    fencing: Fencing, role: NotingRole, clock: Clock, bus: MemoryBus
) -> None:
    """Others wait 4 s. The watch looks every second, and the fence is at 3 s."""
    await fencing.watch()
    bus.connected = False
    for _ in range(3):
        clock.now += 1.0
        await fencing.watch()
    assert role.cancelled == []
    clock.now += FENCE_AFTER_S - 2.9
    await fencing.watch()
    assert role.cancelled == [(CancelReason.BUS_LOST, None)]
    bus.connected = True
    clock.now += 1.0
    await fencing.watch()
    bus.connected = False
    clock.now += 3.0
    await fencing.watch()
    assert len(role.cancelled) == 1, "connected again, the time begins anew"


async def test_gateways_are_not_silent_while_nobody_can_be_heard(
    fencing: Fencing, role: NotingRole, clock: Clock, bus: MemoryBus
) -> None:
    fencing.saw(beat("gw"))
    bus.connected = False
    clock.now += 100.0
    await fencing.watch()
    role.cancelled.clear()
    bus.connected = True
    clock.now += GATEWAY_SILENT_S
    await fencing.watch()
    assert role.cancelled == []
    assert fencing.saw(beat("gw", 2)) is Heard.REPLACED, "who it was is remembered"
