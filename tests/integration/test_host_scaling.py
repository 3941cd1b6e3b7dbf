"""A planner and two hosts on a real bus: workers come as a model's load rises, and go when it falls. Workers only beat."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from common import subjects
from common.bus import Bus, NatsBus, NatsSettings, connect_bus
from common.messages import GatewayState, HostState, ModelLevels, Region, Want, host_state_decoder
from common.peers import Peers
from common.words import HostStatus, WorkerStatus
from planner.planner import Planner, PlannerConfig
from planner.settings import PlanSettings
from services.host import extras
from services.host import host as hosting
from services.host.host import Host
from services.host.plan import HostedWorker, HostPlan
from services.runtime.servers import run_nats
from tests.fakes.workers import LAYOUT, a_worker

PATIENCE_S = 60.0
BEAT_S = 0.05
PERIOD_S = 0.1
QUICK = PlanSettings(hold_s=3 * PERIOD_S, cooldown_s=PERIOD_S, reverse_s=5 * PERIOD_S)
MODEL = "m"


class BeatingChild:
    """A worker's process that beats: ready at once, draining while it is told to stop, then gone."""

    bus: ClassVar[Bus]
    load: ClassVar[int] = 0  # sequences of all of them, of which each has room for 8
    living: ClassVar[dict[str, BeatingChild]] = {}
    drains: ClassVar[list[str]] = []
    lives = itertools.count(1)

    def __init__(self, *, name: str, **_: Any) -> None:
        self.name, self.log_file, self.life = name, Path("/nonexistent"), next(self.lives)

    async def start(self) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.living[self.name] = self
        self.beating = asyncio.create_task(self._beat())

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    async def stop(self, *, timeout_s: float) -> None:
        if self.ended.done():
            return
        self.drains.append(self.name)
        del self.living[self.name]
        self.beating.cancel()
        for status in (WorkerStatus.DRAINING, WorkerStatus.STOPPED):
            await self._say(status)
            await asyncio.sleep(4 * BEAT_S)
        self.ended.set_result(0)

    async def _beat(self) -> None:
        while True:
            await self._say(WorkerStatus.READY)
            await asyncio.sleep(BEAT_S)

    async def _say(self, status: WorkerStatus) -> None:
        running = self.load // max(1, len(self.living))
        region = Region(transport="shm", incarnation=self.life, layout=LAYOUT, address={})
        state = a_worker(
            self.name, "decode", model=MODEL, status=status, running=running, incarnation=self.life, region=region
        )
        await self.bus.publish(subjects.heartbeat(self.name), state)


class Watcher:
    """A gateway that wants the model, and what the hosts say."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.hosts: dict[str, HostState] = {}
        self.most = 0
        self.is_wanted = True
        self._news = asyncio.Event()

    async def beat(self) -> None:
        wanted = {MODEL: Want(keep_s=PATIENCE_S, active=True)}
        while True:
            state = GatewayState(
                gateway="g", incarnation=1, levels={MODEL: ModelLevels()}, wanted=wanted if self.is_wanted else {}
            )
            await self.bus.publish(subjects.gateway_heartbeat("g"), state)
            await asyncio.sleep(BEAT_S)

    def saw(self, state: HostState) -> None:
        self.hosts[state.host] = state
        self.most = max(self.most, len(BeatingChild.living))
        self._news.set()

    async def until(self, *counts: int) -> None:
        """Wait until the hosts say that they have so many workers, in any order, and all others have ended."""
        async with asyncio.timeout(PATIENCE_S):
            while sorted(len(state.models[MODEL].workers) for state in self.hosts.values()) != sorted(counts) or (
                sum(counts) != len(BeatingChild.living)
            ):
                self._news.clear()
                await self._news.wait()


def a_plan(name: str, spare: int) -> HostPlan:
    workers = [
        HostedWorker(name=f"{name}{at}", id=f"{name}{at}", service="decode", variables={}, log_file="/nonexistent")
        for at in range(1 + spare)
    ]
    return HostPlan(models={MODEL: workers[:1]}, spares={MODEL: workers[1:]})


@contextlib.asynccontextmanager
async def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watcher]:
    monkeypatch.setattr(hosting, "Child", BeatingChild)
    for module, name, seconds in (
        (hosting, "BEAT_S", 2 * BEAT_S),
        (hosting, "LISTEN_S", 4 * BEAT_S),
        (extras, "SETTLE_S", 4 * BEAT_S),
    ):
        monkeypatch.setattr(module, name, seconds)
    stopping = asyncio.Event()
    BeatingChild.load, BeatingChild.living, BeatingChild.drains = 0, {}, []
    async with run_nats(data_dir=folder) as server, contextlib.AsyncExitStack() as stack:
        buses = {
            name: await stack.enter_async_context(connect_bus(NatsSettings(url=server.url), name=name))
            for name in ("a", "b", "p", "g")
        }
        BeatingChild.bus = buses["g"]
        watcher = Watcher(buses["g"])
        await watcher.bus.subscribe(subjects.host_heartbeat(subjects.ANY), host_state_decoder, watcher.saw)
        peers = Peers()
        await peers.start(buses["p"])
        stack.push_async_callback(peers.close)
        config = PlannerConfig(planner_id="p", incarnation=1, period_s=PERIOD_S, dry_run=False, plan=QUICK)
        planner = Planner(buses["p"], peers, config)
        await planner.start()
        hosts = [Host(buses[name], a_plan(name, 2), host_id=name, incarnation=1, nursery=None) for name in ("a", "b")]
        tasks = [asyncio.create_task(one.run(stopping)) for one in (planner, *hosts)]
        beating = asyncio.create_task(watcher.beat())
        try:
            yield watcher
        finally:
            stopping.set()
            await asyncio.gather(*tasks)
            beating.cancel()


async def test_workers_come_as_the_load_rises_and_go_when_it_falls_and_the_model_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch) as watcher:
        await watcher.until(1, 0)
        (first,) = BeatingChild.living
        BeatingChild.load = 14  # two workers that are almost full: three
        await watcher.until(2, 1)
        loaded = {name: state.models[MODEL] for name, state in watcher.hosts.items()}
        assert sorted(one.status for one in loaded.values()) == [HostStatus.READY, HostStatus.UNLOADED]
        BeatingChild.load = 1
        await watcher.until(1, 0)
        assert list(BeatingChild.living) == [first]
        assert watcher.most == 3  # no host started what another one had begun
        BeatingChild.load = 14
        await watcher.until(2, 1)
        watcher.is_wanted = False
        await watcher.until(0, 0)
        assert BeatingChild.living == {}
        assert BeatingChild.drains.count(first) == 1


def test_hosts_are_as_patient_as_the_beats_that_they_wait_for() -> None:
    assert extras.SETTLE_S >= 2 * hosting.BEAT_S
    assert 3 * PlannerConfig(planner_id="p", dry_run=False, plan=QUICK).period_s <= extras.PLANNER_SILENT_S
