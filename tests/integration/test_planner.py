"""The planner on a real bus: who is told what, who isn't, and what others hear of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from common import subjects
from common.bus import NatsBus, NatsSettings, connect_bus
from common.messages import (
    GatewayState,
    ModelLevels,
    PlannerState,
    RolesReply,
    SetRoles,
    ToWorker,
    planner_state_decoder,
    to_worker_decoder,
)
from common.peers import Peers
from planner.planner import Planner, PlannerConfig
from planner.settings import PlanSettings
from services.runtime.servers import run_nats
from tests.fakes.workers import a_worker

AT_ONCE = PlanSettings(hold_s=0.0, cooldown_s=0.0, reverse_s=0.0)
PRESSED = GatewayState(gateway="g", incarnation=1, window_s=30.0, arriving_tokens_per_s=5000.0)


class Fleet:
    """One prefill and three decode workers that do as they are told, but for the stubborn ones."""

    def __init__(self, bus: NatsBus, stubborn: tuple[str, ...] = ()) -> None:
        self._bus = bus
        self._stubborn = stubborn
        self.gateway = PRESSED
        self.batch: dict[str, object] = {}  # what decode workers say of theirs
        self.pooled: dict[str, object] = {}  # what workers that pool say
        self.weights: dict[str, str] = {}  # fingerprints, where they are not the usual one
        self.models: dict[str, str] = {}  # names, where they are not the usual one
        self.roles = {"p0": ["prefill"], "d0": ["decode"], "d1": ["decode"], "d2": ["decode"]}
        self.told: list[tuple[str, list[str]]] = []
        self.heard: list[PlannerState] = []
        self.news = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for worker in self.roles:
            await self.listen(worker)
        await self._bus.subscribe(subjects.PLANNER, planner_state_decoder, self._hear)

    async def listen(self, worker: str) -> None:
        await self._bus.serve(subjects.worker(worker), to_worker_decoder, self._obey(worker))

    async def beat(self) -> None:
        for worker, roles in self.roles.items():
            facts = dict(self.batch) if "decode" in roles else dict(self.pooled) if "pool" in roles else {}
            facts["model_fingerprint"] = self.weights.get(worker, "model")
            if worker in self.models:
                facts["model"] = self.models[worker]
            await self._bus.publish(subjects.heartbeat(worker), a_worker(worker, *roles, **facts))
        await self._bus.publish(subjects.gateway_heartbeat("g"), self.gateway)

    def go(self) -> None:
        """Beat from now on, as workers and gateways do."""
        self._beating = asyncio.create_task(self._beat_on())

    def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    async def _beat_on(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(0.2)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                self.news.clear()
                await self.news.wait()

    def _obey(self, worker: str) -> Callable[[ToWorker], Awaitable[RolesReply]]:
        async def obey(message: ToWorker) -> RolesReply:
            assert isinstance(message, SetRoles)
            self.told.append((worker, message.roles))
            accepted = worker not in self._stubborn
            if accepted:
                self.roles[worker] = message.roles
                await self.beat()
            return RolesReply(accepted=accepted, roles=self.roles[worker], reason="" if accepted else "it won't")

        return obey

    def _hear(self, state: PlannerState) -> None:
        self.heard.append(state)
        self.news.set()


@pytest.fixture(scope="module")
async def nats_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with run_nats(data_dir=tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@contextlib.asynccontextmanager
async def planning(nats_url: str, *names: str, dry_run: bool = False) -> AsyncIterator[None]:
    """Planners of these names, which have heard everybody before their first decision."""
    stopping = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for life, name in enumerate(names):
            bus = await stack.enter_async_context(connect_bus(NatsSettings(url=nats_url), name=name))
            peers = Peers()
            await peers.start(bus)
            stack.push_async_callback(peers.close)
            config = PlannerConfig(planner_id=name, incarnation=life, period_s=0.1, dry_run=dry_run, plan=AT_ONCE)
            planner = Planner(bus, peers, config)
            await planner.start()
            tasks.append(asyncio.create_task(planner.run(stopping)))
        yield
        stopping.set()
        await asyncio.gather(*tasks)


def know_each_other(speakers: list[object]) -> bool:
    """Whether each of two spoke after the other one, who listened before it spoke."""
    return len(list(itertools.groupby(speakers))) >= 3


@contextlib.asynccontextmanager
async def fleet_of(nats_url: str, *stubborn: str) -> AsyncIterator[Fleet]:
    async with connect_bus(NatsSettings(url=nats_url), name="fleet") as bus:
        fleet = Fleet(bus, stubborn)
        await fleet.start()
        yield fleet
        fleet.stop()


async def test_workers_are_told_one_after_another_and_whoever_asks_hears_why(nats_url: str) -> None:
    async with fleet_of(nats_url) as fleet, planning(nats_url, "planner"):
        fleet.go()
        await fleet.until(lambda: bool(fleet.heard) and fleet.heard[-1].workers == {"prefill": 3, "decode": 1})
    assert fleet.told == [("d0", ["prefill"]), ("d1", ["prefill"])]
    last = fleet.heard[-1]
    assert (last.planner, last.acts, last.moves) == ("planner", True, 2)
    assert last.desired == {"prefill": 6, "decode": 1}
    assert "no decode worker can be spared" in last.reason


async def test_long_decode_steps_in_heartbeats_get_decode_a_worker(nats_url: str) -> None:
    async with fleet_of(nats_url) as fleet, planning(nats_url, "planner"):
        fleet.gateway = GatewayState(gateway="g", incarnation=1, window_s=30.0, tpot_met=0, tpot_count=20)
        fleet.roles = {"p0": ["prefill"], "p1": ["prefill"], "d0": ["decode"]}
        fleet.batch = {"decode_step_ms": 60.0, "running": 4}
        fleet.go()
        await fleet.until(lambda: bool(fleet.heard) and fleet.heard[-1].moves == 1)
    assert fleet.told == [("p0", ["decode"])]


async def test_a_worker_that_refuses_is_not_asked_again(nats_url: str) -> None:
    async with fleet_of(nats_url, "d0") as fleet, planning(nats_url, "planner"):
        fleet.go()
        await fleet.until(lambda: bool(fleet.heard) and fleet.heard[-1].workers == {"prefill": 3, "decode": 1})
    assert [worker for worker, _ in fleet.told] == ["d0", "d1", "d2"]


async def test_a_dry_run_moves_nobody(nats_url: str) -> None:
    async with fleet_of(nats_url) as fleet, planning(nats_url, "planner", dry_run=True):
        fleet.go()
        await fleet.until(lambda: len(fleet.heard) >= 3 and "prefill is pressed" in fleet.heard[-1].reason)
    assert fleet.told == []
    assert not any(state.acts for state in fleet.heard)


async def test_of_two_planners_the_one_with_the_smaller_name_acts(nats_url: str) -> None:
    async with fleet_of(nats_url) as fleet, planning(nats_url, "b", "a"):
        await fleet.until(lambda: know_each_other([state.planner for state in fleet.heard]))
        fleet.go()
        await fleet.until(lambda: fleet.heard[-1].planner == "a" and fleet.heard[-1].moves == 2)
        since = [state for state in fleet.heard if state.moves]
    assert [worker for worker, _ in fleet.told] == ["d0", "d1"]
    assert {state.planner for state in since} == {"a"}


async def test_of_two_planners_with_one_name_the_older_acts(nats_url: str) -> None:
    async with fleet_of(nats_url) as fleet, planning(nats_url, "planner", "planner"):
        await fleet.until(lambda: know_each_other([state.incarnation for state in fleet.heard]))
        fleet.go()
        await fleet.until(lambda: fleet.heard[-1].incarnation == 0 and fleet.heard[-1].moves == 2)
        since = [state for state in fleet.heard if state.moves]
    assert [worker for worker, _ in fleet.told] == ["d0", "d1"]
    assert {state.incarnation for state in since} == {0}


async def test_each_models_workers_are_moved_by_its_own_load(nats_url: str) -> None:
    async with fleet_of(nats_url) as fleet, planning(nats_url, "planner"):
        fleet.roles |= {"q0": ["prefill"], "e0": ["decode"], "e1": ["decode"], "e2": ["decode"]}
        fleet.models = dict.fromkeys(("p0", "d0", "d1", "d2"), "idle") | dict.fromkeys(("q0", "e0", "e1", "e2"), "busy")
        fleet.weights = dict.fromkeys(("q0", "e0", "e1", "e2"), "busy's")
        for worker in ("q0", "e0", "e1", "e2"):
            await fleet.listen(worker)
        level = ModelLevels(arriving_tokens_per_s=5000.0)
        fleet.gateway = msgspec.structs.replace(PRESSED, levels={"busy": level})
        fleet.go()
        await fleet.until(lambda: bool(fleet.heard) and fleet.heard[-1].workers == {"prefill": 4, "decode": 4})
    assert [worker for worker, _ in fleet.told] == ["e0", "e1"]
    assert fleet.heard[-1].moves == 2
    assert fleet.heard[-1].models["idle"] == {"prefill": 0, "decode": 1}
    assert fleet.heard[-1].models["busy"]["prefill"] > 3
    assert "idle: no role is pressed" in fleet.heard[-1].reason


async def test_the_sum_of_an_older_gateway_moves_nobody_of_several_models(nats_url: str) -> None:
    async with fleet_of(nats_url) as fleet, planning(nats_url, "planner"):
        fleet.models = {"d2": "other"}
        fleet.gateway = msgspec.structs.replace(PRESSED, ttft_count=10)
        fleet.go()
        await fleet.until(lambda: sum("load as one sum" in state.reason for state in fleet.heard) >= 3)
        assert fleet.told == []


async def test_workers_of_one_model_with_several_weights_are_left_where_they_are(nats_url: str) -> None:
    """The load that gateways tell is a sum over weights: it says nothing about one's roles."""
    async with fleet_of(nats_url) as fleet, planning(nats_url, "planner"):
        fleet.weights = {"d2": "other weights"}
        fleet.go()
        await fleet.until(lambda: sum("have 2 kinds" in state.reason for state in fleet.heard) >= 3)
        assert fleet.told == []
        fleet.weights = {}
        await fleet.until(lambda: fleet.heard[-1].workers == {"prefill": 3, "decode": 1})


async def test_an_empty_fleet_is_told_of_too(nats_url: str) -> None:
    async with fleet_of(nats_url) as fleet, planning(nats_url, "planner"):
        await fleet.until(lambda: bool(fleet.heard))
    assert fleet.heard[0].desired == {"prefill": 0, "decode": 1}


async def test_workers_that_pool_are_counted_beside_the_others(nats_url: str) -> None:
    async with fleet_of(nats_url) as fleet:
        fleet.roles["e0"], fleet.models["e0"] = ["pool"], "vectors"
        fleet.pooled = {"queued_tokens": 3500, "busy": True}
        fleet.go()
        async with planning(nats_url, "p"):
            await fleet.until(
                lambda: bool(fleet.heard) and fleet.heard[-1].wanted.get("vectors", {}).get("pool", 0) >= 4
            )
        fleet.stop()
        heard = fleet.heard[-1]
        assert heard.models["vectors"]["pool"] >= 4
        assert set(heard.wanted["model"]) == {"prefill", "decode"}
        assert "vectors: pool has a pressure of" in heard.reason
        assert "e0" not in [worker for worker, _ in fleet.told]
