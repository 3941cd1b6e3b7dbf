"""A host's models through their lives, by wishes, heartbeats and orders on a bus in memory; its children do nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common import subjects
from common.messages import Ack, GatewayState, HostState, Unload, Want, host_reply_decoder, host_state_decoder
from common.words import HostStatus, WorkerStatus
from services.host import host as hosting
from services.host.host import MAX_RESTARTS, Host
from services.host.plan import HostedWorker, HostPlan, PulledPlan
from services.host.pulled import Found, PulledModels
from tests.fakes.bus import MemoryBus
from tests.fakes.children import IdleChild
from tests.fakes.workers import a_worker

PATIENCE_S = 60.0


class World:
    """A host of one model `m` with one worker `w`, and a gateway `g`."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.told: dict[str, HostStatus] = {}
        self.free_cards = 0
        self._news = asyncio.Event()

    def saw(self, state: HostState) -> None:
        self.told = {name: model.status for name, model in state.models.items()}
        self.free_cards = state.free_cards
        self._news.set()

    async def until(self, status: HostStatus) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.told.get("m") is not status:
                await self._news.wait()
                self._news.clear()

    async def want(self, **wanted: Want) -> None:
        await self.bus.publish(
            subjects.gateway_heartbeat("g"), GatewayState(gateway="g", incarnation=1, wanted=dict(wanted))
        )

    async def worker(self, status: WorkerStatus) -> None:
        await self.bus.publish(subjects.heartbeat("w"), a_worker("w", "decode", model="m", status=status))

    async def order(self, *, parks: bool) -> Ack:
        order = Unload(model="m", parks=parks)
        reply: Ack = await self.bus.request(subjects.host("h", "g"), order, host_reply_decoder, timeout_s=1.0)
        return reply


@contextlib.asynccontextmanager
async def hosted(monkeypatch: pytest.MonkeyPatch, **plan: Any) -> AsyncIterator[World]:
    """A running host; its plan with these changes."""
    IdleChild.forget()
    monkeypatch.setattr(hosting, "Child", IdleChild)
    monkeypatch.setattr(hosting, "LISTEN_S", 0.0)
    world, stopping = World(), asyncio.Event()
    await world.bus.subscribe(subjects.host_heartbeat("h"), host_state_decoder, world.saw)
    worker = HostedWorker(name="w", id="w", service="worker", variables={}, log_file="/nonexistent")
    whole = HostPlan(**({"models": {"m": [worker]}} | plan))
    host = Host(world.bus, whole, host_id="h", incarnation=1, nursery=None)
    running = asyncio.create_task(host.run(stopping))
    try:
        await world.until(HostStatus.UNLOADED)
        yield world
    finally:
        IdleChild.drained.set()
        stopping.set()
        await running


@pytest.mark.parametrize(("parks", "left"), [(True, HostStatus.PARKED), (False, HostStatus.UNLOADED)])
async def test_an_order_that_comes_while_a_model_loads_holds_once_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, parks: bool, left: HostStatus
) -> None:
    async with hosted(monkeypatch, parks_s=0.0 if parks else 3600.0) as world:
        await world.want(m=Want(keep_s=3600.0, active=True))
        await world.until(HostStatus.LOADING)
        await world.want(m=Want(keep_s=3600.0))  # who asked has left
        assert (await world.order(parks=parks)).known
        await world.want()
        await world.worker(WorkerStatus.READY)
        await world.until(HostStatus.UNLOADING)
        (child,) = IdleChild.born
        assert child.signals == ([signal.SIGUSR1] if parks else [])
        if parks:
            await world.worker(WorkerStatus.SLEEPING)
        await world.until(left)


async def test_an_order_holds_until_the_model_is_wanted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosted(monkeypatch) as world:  # idle models don't sleep by the plan
        await world.want(m=Want(keep_s=3600.0, active=True))
        await world.until(HostStatus.LOADING)
        await world.want(m=Want(keep_s=3600.0))
        await world.order(parks=True)
        await world.worker(WorkerStatus.READY)
        await world.until(HostStatus.UNLOADING)
        await world.worker(WorkerStatus.SLEEPING)
        await world.until(HostStatus.PARKED)
        await world.bus.publish(  # another gateway's, which knows nothing of the order
            subjects.gateway_heartbeat("f"),
            GatewayState(gateway="f", incarnation=1, wanted={"m": Want(keep_s=3600.0)}),
        )
        await world.until(HostStatus.LOADING)
        await world.worker(WorkerStatus.READY)
        await world.until(HostStatus.READY)
        await world.bus.publish(subjects.gateway_heartbeat("f"), GatewayState(gateway="f", incarnation=1))
        await world.until(HostStatus.UNLOADED)
        assert IdleChild.born[0].signals == [signal.SIGUSR1, signal.SIGUSR2]


async def test_a_model_that_cant_be_kept_is_not_ready_while_its_other_workers_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosted(monkeypatch) as world:
        await world.want(m=Want(keep_s=3600.0, active=True))
        await world.until(HostStatus.LOADING)
        IdleChild.drained.clear()
        for death in range(MAX_RESTARTS + 1):
            await world.until(HostStatus.LOADING)
            await world.worker(WorkerStatus.READY)
            await world.until(HostStatus.READY)
            (child,) = IdleChild.born
            assert child.starts == death + 1
            child.ended.set_result(1)
        await world.until(HostStatus.UNLOADING)
        IdleChild.drained.set()
        await world.until(HostStatus.FAILED)


def on(device: str, count: int, kind: str = "TENSOR") -> HostedWorker:
    variables = {"BATON_DEVICE": device, f"BATON_{kind}_PARALLEL_SIZE": str(count)}
    return HostedWorker(name=device, id=device, service="worker", variables=variables, log_file="/nonexistent")


async def test_a_pulled_model_that_went_from_the_cache_stays_while_it_has_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = PulledPlan(patterns=("org/*",), slots=[[on("cuda:4", 1)]])
    here = {"m": Found(Path("/m"), 0)}
    monkeypatch.setattr(PulledModels, "look", lambda self: dict(here))
    monkeypatch.setattr(hosting, "CACHE_S", 0.01)
    holds = [True]
    monkeypatch.setattr(PulledModels, "has_a_slot", lambda self, name: holds[0])
    async with hosted(monkeypatch, models={}, pulled=plan) as world:
        here.clear()
        looked = asyncio.Event()
        monkeypatch.setattr(PulledModels, "look", lambda self: looked.set() or {})
        await looked.wait()
        looked.clear()
        await looked.wait()
        world.told = {}
        await world.until(HostStatus.UNLOADED)
        holds[0] = False
        async with asyncio.timeout(PATIENCE_S):
            while world.told:
                await world._news.wait()
                world._news.clear()


async def test_gpus_are_free_that_no_rank_of_a_loaded_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"m": [on("cuda:0", 2)], "wider": [on("cuda:0", 4, "PIPELINE")], "alone": [on("cpu", 2)]}
    pulled = PulledPlan(patterns=("org/*",), slots=[[on("cuda:4", 1)]])
    monkeypatch.setattr(PulledModels, "look", lambda self: {})
    async with hosted(monkeypatch, models=models, pulled=pulled) as world:
        assert world.free_cards == 5
        await world.want(m=Want(keep_s=3600.0, active=True))
        await world.until(HostStatus.LOADING)
        assert world.free_cards == 3
