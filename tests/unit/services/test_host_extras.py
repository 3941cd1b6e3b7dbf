"""Workers that a host starts and stops by the planner's counts; its children do nothing, and the clock is an argument."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common.messages import HostedModel, HostState, PlannerState
from common.words import HostStatus, WorkerStatus
from services.host import extras as module
from services.host.extras import FAILED_FOR_S, PLANNER_SILENT_S, SETTLE_S, Extras
from services.host.models import Model
from services.host.plan import HostedWorker, HostPlan, PulledPlan
from services.host.pulled import Found, PulledModels
from tests.fakes.children import IdleChild
from tests.fakes.workers import a_worker

STEP_S = 0.1


def worker(name: str, service: str = "decode", *, device: str = "", **facts: Any) -> HostedWorker:
    variables = {"BATON_DEVICE": device}
    return HostedWorker(name=name, id=name, service=service, variables=variables, log_file="/nonexistent", **facts)


@dataclass
class World:
    """A host of the model `m`, which is loaded, with one worker and two spare ones; and of `n`, which is not."""

    spares: list[HostedWorker]
    now: float = 1000.0
    wanted: dict[str, int] = field(default_factory=dict)
    others: list[HostState] = field(default_factory=list)
    max_loaded: int = 0
    has_planner: bool = True
    changes: int = 0

    def __post_init__(self) -> None:
        self.models = {
            "m": Model("m", [worker("d0")], status=HostStatus.READY),
            "n": Model("n", [worker("n0", device="cuda:1")]),
        }
        plan = HostPlan(
            models={name: model.workers for name, model in self.models.items()},
            spares={"m": self.spares},
            max_loaded=self.max_loaded,
        )
        self.extras = Extras(plan, self.models, lambda one: IdleChild(name=one.name), self._changed)  # type: ignore[arg-type, return-value]

    def _changed(self) -> None:
        self.changes += 1

    @property
    def offer(self) -> HostedModel:
        return self.extras.offer(self.models["m"], self.now)

    @property
    def running(self) -> list[str]:
        """The spare workers that run and are to stay."""
        return self.offer.extra

    async def after(self, seconds: float) -> None:
        """Let time go by, with heartbeats of planner and host in each step."""
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            if self.has_planner:
                self.extras.saw_planner(plan_of(self.wanted), self.now)
            told = HostState(host="h", incarnation=1, models={"m": self.offer})
            self.extras.follow(self.now, told, self.others)
            for _ in range(10):  # tasks that were started or told run
                await asyncio.sleep(0)


def plan_of(wanted: dict[str, int], planner: str = "p", *, acts: bool = True) -> PlannerState:
    return PlannerState(
        planner=planner,
        acts=acts,
        workers={},
        desired={},
        pressures={},
        reason="",
        wanted={"m": wanted} if wanted else {},
    )


@contextlib.asynccontextmanager
async def world(*spares: HostedWorker, **facts: Any) -> AsyncIterator[World]:
    IdleChild.forget()
    made = World(list(spares) or [worker("d1"), worker("d2")], **facts)
    try:
        yield made
    finally:
        IdleChild.drained.set()
        await made.extras.close()


async def test_single_workers_come_and_go_with_the_count_within_what_is_spare() -> None:
    async with world(wanted={"decode": 2}) as made:
        await made.after(SETTLE_S - STEP_S)
        assert made.running == []
        await made.after(3 * STEP_S)
        assert made.running == ["d1"]
        assert made.offer.workers == {"d0": ["decode"], "d1": ["decode"]}
        made.wanted = {"decode": 9}
        await made.after(2 * SETTLE_S)
        assert made.running == ["d1", "d2"]
        assert made.offer.spare == {}
        made.wanted = {"decode": 0}
        IdleChild.drained.clear()
        await made.after(2 * SETTLE_S)
        assert made.running == []
        assert made.offer.workers == {"d0": ["decode"]}
        assert made.offer.spare == {}  # they drain
        IdleChild.drained.set()
        await made.after(SETTLE_S)
        assert made.offer.spare == {"decode": 2}
        assert [child.name for child in IdleChild.born] == ["d1", "d2"]


async def test_a_count_that_does_not_last_changes_nothing() -> None:
    async with world() as made:
        for count in itertools.islice(itertools.cycle((2, 1)), 10):
            made.wanted = {"decode": count}
            await made.after(SETTLE_S - STEP_S)
        assert IdleChild.born == []


async def test_a_planner_that_is_away_or_does_not_act_changes_nothing() -> None:
    async with world(wanted={"decode": 2}) as made:
        await made.after(2 * SETTLE_S)
        assert made.running == ["d1"]
        made.has_planner = False
        await made.after(PLANNER_SILENT_S + 3 * SETTLE_S)
        assert made.running == ["d1"]
        for _ in range(30):
            made.extras.saw_planner(plan_of({"decode": 3}, acts=False), made.now)
            await made.after(STEP_S)
        assert made.running == ["d1"]
        made.has_planner, made.wanted = True, {}  # one that was just started tells nothing yet
        await made.after(3 * SETTLE_S)
        assert made.running == ["d1"]


async def test_of_planners_that_act_the_smallest_name_counts() -> None:
    async with world(wanted={"decode": 1}) as made:
        for _ in range(30):
            made.extras.saw_planner(plan_of({"decode": 3}, "q"), made.now)
            await made.after(STEP_S)
        assert made.running == []


async def test_they_end_with_their_model_wherever_it_was_loaded() -> None:
    async with world(wanted={"decode": 2}) as made:
        made.models["m"].status = HostStatus.UNLOADED
        made.others = [HostState(host="g", incarnation=1, models={"m": HostedModel(status=HostStatus.READY)})]
        await made.after(3 * SETTLE_S)
        assert made.running == ["d1", "d2"]  # the other host says of no worker
        made.others = []
        await made.after(2 * SETTLE_S)
        assert made.running == []


async def test_workers_that_no_host_started_are_counted_while_they_are_heard() -> None:
    async with world(wanted={"decode": 2}) as made:
        for _ in range(30):
            made.extras.saw_worker(a_worker("far", "decode", model="m"), made.now)
            await made.after(STEP_S)
        assert made.running == []
        made.extras.saw_worker(a_worker("far", "decode", model="m", status=WorkerStatus.DRAINING), made.now)
        await made.after(2 * SETTLE_S)
        assert made.running == ["d1"]


async def test_a_worker_that_was_moved_counts_for_the_role_it_has() -> None:
    async with world(wanted={"prefill": 1, "decode": 1}) as made:
        for _ in range(30):
            made.extras.saw_worker(a_worker("d0", "prefill", model="m"), made.now)
            await made.after(STEP_S)
        assert made.offer.workers == {"d0": ["prefill"], "d1": ["decode"]}


async def test_one_that_fails_leaves_its_model_alone_and_waits_before_it_is_tried_again() -> None:
    async with world(worker("d1"), wanted={"decode": 2}, now=0.0) as made:
        await made.after(2 * SETTLE_S)
        IdleChild.born[0].ended.set_result(1)
        await made.after(STEP_S)
        made.extras._failed = dict.fromkeys(made.extras._failed, made.now)  # real clock to this one
        assert made.models["m"].status is HostStatus.READY
        assert (made.running, made.offer.spare) == ([], {})
        await made.after(FAILED_FOR_S / 2)
        assert len(IdleChild.born) == 1
        await made.after(FAILED_FOR_S)
        assert [child.name for child in IdleChild.born] == ["d1", "d1"]


@pytest.mark.parametrize(
    ("spare", "facts"),
    [
        (worker("d1", needs_bytes=10), {}),
        (worker("d1", threads=3), {}),
        (worker("d1", device="cuda:1"), {}),
        (worker("d1"), {"status": HostStatus.LOADING}),  # of another model: it has not taken its memory yet
    ],
)
async def test_none_is_offered_that_this_machine_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, spare: HostedWorker, facts: dict[str, Any]
) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda: 9.0)
    monkeypatch.setattr(module, "physical_cores", lambda: 2)
    async with world(spare, wanted={"decode": 2}) as made:
        other = made.models["n"]
        other.status, other.children = facts.get("status", HostStatus.READY), [IdleChild(name="n0")]  # type: ignore[list-item]
        await made.after(3 * SETTLE_S)
        assert (made.running, made.offer.spare) == ([], {})


async def test_room_for_one_is_offered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda: 15.0)
    monkeypatch.setattr(module, "physical_cores", lambda: 5)
    async with world(worker("d1", needs_bytes=10), worker("d2", needs_bytes=10)) as made:
        assert made.offer.spare == {"decode": 1}
    async with world(worker("d1", threads=3), worker("d2", threads=3)) as made:
        assert made.offer.spare == {"decode": 1}


async def test_those_of_a_pulled_model_have_its_slot_and_go_with_its_files_version() -> None:
    one, two = ([worker(f"{name}{slot}") for slot in range(2)] for name in "ds")
    plan = PulledPlan(patterns=("*",), slots=[[each] for each in one], spares=[[each] for each in two])
    pulled = PulledModels(plan)
    async with world(wanted={"decode": 2}) as made:
        found = Found(Path("/m/1"), 5, spare_bytes=(7,))
        made.models = {name: Model(name, [], found=found, status=HostStatus.UNLOADED) for name in ("m", "n")}
        made.extras = Extras(
            HostPlan(models={}, pulled=plan),
            made.models,
            lambda one: IdleChild(name=one.name),
            made._changed,
            pulled,  # type: ignore[arg-type, return-value]
        )
        m = made.models["m"]
        m.status, m.workers = HostStatus.READY, pulled.take("m", found)
        await made.after(2 * SETTLE_S)
        assert made.offer.workers == {"d0": ["decode"], "s0": ["decode"]}
        assert made.extras.offer(made.models["n"], made.now).spare == {"decode": 1}
        m.status, m.workers = HostStatus.UNLOADED, []
        pulled.give_back("m")  # as its host does; the spare one still drains
        IdleChild.drained.clear()
        await made.after(2 * SETTLE_S)
        assert [each.id for each in pulled.next_workers("n", found)] == ["d1"]
        IdleChild.drained.set()
        await made.after(STEP_S)
        assert not pulled.has_a_slot("m")
        m.status, m.workers = HostStatus.READY, pulled.take("m", found)
        m.found = Found(Path("/m/2"), 5, spare_bytes=(7,))  # pulled anew
        await made.after(2 * SETTLE_S)
        assert (made.running, made.offer.spare) == ([], {})


@pytest.mark.parametrize("what", ["memory", "card", "place"])
async def test_they_give_way_to_a_model_that_is_to_be_loaded(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    spare = worker("d1", device="cuda:1" if what == "card" else "")
    async with world(spare, wanted={"decode": 2}, max_loaded=1 if what == "place" else 2) as made:
        if what == "place":  # the model itself is loaded elsewhere
            made.models["m"].status = HostStatus.UNLOADED
            made.others = [HostState(host="g", incarnation=1, models={"m": HostedModel(status=HostStatus.READY)})]
        await made.after(2 * SETTLE_S)
        assert made.running == ["d1"]
        load = made.models["n"]
        load.needs_bytes = 10
        monkeypatch.setattr(module, "free_bytes", lambda: 5.0 if what == "memory" else 50.0)
        IdleChild.drained.clear()
        assert made.extras.make_room(load)
        assert made.extras.make_room(load)  # it drains
        IdleChild.drained.set()
        await made.after(STEP_S)
        assert not made.extras.make_room(load)
        assert not made.extras.make_room(made.models["m"])
