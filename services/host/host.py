"""The host: hears which models gateways want, and starts and stops their workers."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from common import subjects
from common.bus import Bus
from common.errors import UnavailableError
from common.messages import (
    Ack,
    GatewayState,
    HostState,
    PlannerState,
    Unload,
    Want,
    WorkerState,
    gateway_state_decoder,
    host_state_decoder,
    planner_state_decoder,
    to_host_decoder,
    worker_state_decoder,
)
from common.tasks import Ready, cancel_all
from common.words import HostStatus, WorkerStatus
from services.host.child import Child, describe_exit, why_ended
from services.host.extras import MAX_REASON_CHARS, STOP_MARGIN_S, Extras
from services.host.models import Model, Wish
from services.host.nursery import Nursery
from services.host.plan import HostedWorker, HostPlan, cards_of
from services.host.policy import ModelView, decide
from services.host.pulled import Found, PulledModels
from services.host.room import free_bytes, too_large
from services.host.sharing import SILENT_S, leaves_to
from services.runtime.permissions import WORKERS

log = logging.getLogger("baton.host")

BEAT_S = 0.5
LOOK_S = 0.1
CACHE_S = 1.0
LISTEN_S = 2 * BEAT_S  # to other hosts, before it loads anything
MAX_RESTARTS = 3  # a model's workers, while it is loaded
RESTART_WINDOW_S = 60.0
# Workers that take longer to wake or to fall asleep are ended. Pinning memory takes a second for some gigabytes.
WAKE_S, SLEEP_S = 30.0, 120.0
NOT_HERE = (HostStatus.UNLOADED, HostStatus.FAILED, HostStatus.PARKED)  # another host may load it


class Host:
    """Loads and unloads the models of a plan."""

    def __init__(self, bus: Bus, plan: HostPlan, *, host_id: str, incarnation: int, nursery: Nursery | None) -> None:
        self._bus = bus
        self._plan = plan
        self._host_id = host_id
        self._incarnation = incarnation
        self._nursery = nursery
        now, needs = time.monotonic(), plan.needs_bytes
        self._models = {
            name: Model(name, workers, needs.get(name, 0), since=now) for name, workers in plan.models.items()
        }
        self._of_worker = {worker.id: model for model in self._models.values() for worker in model.workers}
        self._pulled = None if plan.pulled is None else PulledModels(plan.pulled)
        self._changed = asyncio.Event()
        self._extras = Extras(plan, self._models, self._child, self._changed.set, self._pulled)
        self._others: dict[str, tuple[float, HostState]] = {}
        self._began_at = time.monotonic()
        self._told = self._state(time.monotonic())

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow the wishes until signalled; then let all workers drain."""
        # Gateways must not hear a host that lacks a model for which requests wait.
        if self._pulled is not None:
            await self._look_once(self._pulled)
        await self._bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self._saw_gateway)
        await self._bus.subscribe(subjects.ALL_HEARTBEATS, worker_state_decoder, self._saw_worker)
        await self._bus.subscribe(subjects.host_heartbeat(subjects.ANY), host_state_decoder, self._saw_host)
        if self._plan.follows_a_planner:
            await self._bus.subscribe(subjects.planner(subjects.ANY), planner_state_decoder, self._saw_planner)
        await self._bus.serve(subjects.host(self._host_id, subjects.ANY), to_host_decoder, self._answer)
        log.info("host.ready", extra={"host": self._host_id, "models": ", ".join(self._models)})
        beating, looking = asyncio.create_task(self._beat()), asyncio.create_task(self._look())
        told = asyncio.create_task(stopping.wait())
        try:
            while not stopping.is_set():
                self._follow(time.monotonic())
                await asyncio.wait([told], timeout=LOOK_S)
        finally:
            running = [model.running for model in self._models.values() if model.running is not None]
            for model in self._models.values():
                model.stopping.set()
            await self._extras.close()
            if running:
                await asyncio.wait(running)
            await cancel_all([beating, looking, told])

    async def _look(self) -> None:
        """Follow what comes to the cache, and goes."""
        while self._pulled is not None:
            await asyncio.sleep(CACHE_S)
            await self._look_once(self._pulled)

    async def _look_once(self, pulled: PulledModels) -> None:
        try:
            found = await asyncio.to_thread(pulled.look)
        except OSError as error:
            log.warning("host.cache_unread", extra={"error": str(error)})
            return
        before = set(self._models)
        self._offer(found)
        if self._models.keys() != before:
            log.info("host.found", extra={"models": ", ".join(self._models)})
            self._changed.set()

    def _offer(self, found: Mapping[str, Found]) -> None:
        """Have the models of the cache beside the plan's. One that is loaded and went from there stays until it is unloaded."""
        pulled = [model for model in self._models.values() if model.found is not None]
        for model in pulled:
            is_idle = model.status in (HostStatus.UNLOADED, HostStatus.FAILED)
            if model.name not in found and is_idle and not (self._pulled and self._pulled.has_a_slot(model.name)):
                del self._models[model.name]
        for name, one in found.items():
            model = self._models.setdefault(name, Model(name, [], found=one, since=time.monotonic()))
            if model.found is not None:
                model.found, model.needs_bytes = one, one.needs_bytes

    # -- what others say -----------------------------------------------------------------------------------------------

    def _saw_gateway(self, state: GatewayState) -> None:
        now = time.monotonic()
        for name, model in self._models.items():
            want = state.wanted.get(name)
            if want is None:
                model.wishes.pop(state.gateway, None)
            else:
                self._take(model, state.gateway, want, now)

    def _take(self, model: Model, gateway: str, want: Want, now: float) -> None:
        known = model.wishes.get(gateway)
        if want.active:
            model.active_at = now
            if known is None or not known.active:
                model.told_s = None
        until = now + max(want.keep_s, 2 * BEAT_S if want.active else 0.0)
        dismissed = known is not None and known.dismissed and (known.active or not want.active)
        since = known.since if known is not None and known.until > now and known.active == want.active else now
        model.wishes[gateway] = Wish(until, since, want.active, dismissed)

    def _saw_host(self, state: HostState) -> None:
        if state.host != self._host_id:
            self._others[state.host] = time.monotonic(), state

    def _saw_planner(self, state: PlannerState) -> None:
        self._extras.saw_planner(state, time.monotonic())

    def _saw_worker(self, state: WorkerState) -> None:
        self._extras.saw_worker(state, time.monotonic())
        model = self._of_worker.get(state.worker)
        if model is None or state.model != model.name:
            return
        for status, workers in ((WorkerStatus.READY, model.ready), (WorkerStatus.SLEEPING, model.asleep)):
            (workers.add if state.status is status else workers.discard)(state.worker)
        if model.status is HostStatus.LOADING and len(model.ready) == len(model.workers):
            self._now(model, HostStatus.READY)
        elif model.status is HostStatus.UNLOADING and model.parks and len(model.asleep) == len(model.workers):
            self._now(model, HostStatus.PARKED)

    def _answer(self, order: Unload) -> Ready[Ack]:
        model = self._models.get(order.model)
        if model is not None:
            for wish in model.wishes.values():
                wish.dismissed = True
            model.told_s = math.inf if order.parks else 0.0
            if model.status is HostStatus.PARKED and not order.parks:
                self._end(model)
        return Ready(Ack(known=model is not None))

    # -- what follows --------------------------------------------------------------------------------------------------

    def _follow(self, now: float) -> None:
        self._hurry(now)
        self._others = {name: seen for name, seen in self._others.items() if now - seen[0] < SILENT_S}
        views = {name: self._view(name, model, now) for name, model in self._models.items()}
        steps = decide(now, views, self._plan.max_loaded, free_bytes=free_bytes)
        for name in steps.unload:
            self._end(self._models[name])
        for name in steps.park:
            self._park(self._models[name])
        for name in steps.load:
            model = self._models[name]
            if self._extras.make_room(model):
                continue
            model.ready.clear()
            # An order from here on holds until the model is wanted again.
            model.told_s = None
            if model.status is HostStatus.PARKED:
                self._wake(model)
                continue
            if not self._is_equipped(model):
                continue
            model.stopping = asyncio.Event()
            self._now(model, HostStatus.LOADING)
            model.running = asyncio.create_task(self._live(model))
        if now - self._began_at >= LISTEN_S:
            self._extras.follow(now, self._told, [state for _, state in self._others.values()])

    def _is_equipped(self, model: Model) -> bool:
        """True if a model has workers to start: one of the cache takes those of a slot, if it fits into memory."""
        if model.found is None or self._pulled is None:
            return True
        if model.needs_bytes > (free := free_bytes()):
            self._now(model, HostStatus.FAILED, too_large(model.needs_bytes, free))
            return False
        model.workers = self._pulled.take(model.name, model.found)
        if not model.workers:
            self._free_a_slot()
        self._of_worker |= {worker.id: model for worker in model.workers}
        return bool(model.workers)

    def _free_a_slot(self) -> None:
        """End the model of the cache that sleeps longest: its processes have a slot, though it takes no place."""
        parked = [one for one in self._models.values() if one.found is not None and one.status is HostStatus.PARKED]
        if parked:
            self._end(min(parked, key=lambda one: one.since))

    def _hurry(self, now: float) -> None:
        """End workers that neither fall asleep nor wake in time; who is wanted is loaded anew."""
        for model in self._models.values():
            changes = model.parks and model.status in (HostStatus.UNLOADING, HostStatus.LOADING)
            limit_s = SLEEP_S + self._plan.drain_s if model.status is HostStatus.UNLOADING else WAKE_S
            if changes and now - model.since > limit_s:
                self._end(model)

    def _park(self, model: Model) -> None:
        self._now(model, HostStatus.UNLOADING)
        model.parks, model.asleep = True, set()
        for child in model.children:
            child.signal(signal.SIGUSR1)

    def _wake(self, model: Model) -> None:
        self._now(model, HostStatus.LOADING)
        for child in model.children:
            child.signal(signal.SIGUSR2)

    def _end(self, model: Model) -> None:
        self._now(model, HostStatus.UNLOADING)
        model.parks = False
        model.stopping.set()

    async def _live(self, model: Model) -> None:
        """The life of a model's workers, from their start until they are told to stop, or can't be kept alive."""
        children = model.children = [self._child(worker) for worker in model.workers]
        deaths: list[float] = []
        told = asyncio.create_task(model.stopping.wait())
        reason = ""
        try:
            await asyncio.gather(*(child.start() for child in children))
            while not model.stopping.is_set() and not reason:
                dying = {asyncio.create_task(child.wait()): child for child in children}
                done, _ = await asyncio.wait([told, *dying], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {told}:
                    reason = await self._died(model, dying[task], task.result(), deaths)
                await cancel_all([task for task in dying if not task.done()])
        except OSError as error:
            reason = f"its processes could not be started: {error.strerror}"
        finally:
            told.cancel()
            if reason:  # what is left of it drains, and takes no requests
                self._end(model)
            stop_s = self._plan.drain_s + STOP_MARGIN_S
            await asyncio.gather(*(child.stop(timeout_s=stop_s) for child in children))
            if reason:
                log.error("host.failed", extra={"model": model.name, "why": reason})
            model.children, model.parks = [], False
            if model.found is not None and self._pulled is not None:
                model.workers = []
                self._pulled.give_back(model.name)
            self._now(model, HostStatus.FAILED if reason else HostStatus.UNLOADED, reason)

    async def _died(self, model: Model, child: Child, code: int, deaths: list[float]) -> str:
        """Start a dead worker again; or return why its model can't be kept."""
        now = time.monotonic()
        deaths[:] = [at for at in deaths if now - at < RESTART_WINDOW_S] + [now]
        why = f"{child.name} ended with {describe_exit(code)}: {why_ended(child.log_file)}"
        log.warning("host.worker_died", extra={"worker": child.name, "why": why[:MAX_REASON_CHARS]})
        if model.parks and model.status is not HostStatus.LOADING:  # it is not wanted
            self._end(model)
        if model.stopping.is_set():
            return ""
        if (code > 0 and model.status is HostStatus.LOADING) or len(deaths) > MAX_RESTARTS:
            return why
        model.ready.clear()
        model.parks = False
        self._now(model, HostStatus.LOADING)
        await child.start()
        return ""

    def _child(self, worker: HostedWorker) -> Child:
        return Child(
            name=worker.name,
            service=worker.service,
            settings=worker.variables,
            log_file=Path(worker.log_file),
            bear=self._nursery.born if self._nursery is not None and worker.service in WORKERS else None,
        )

    def _now(self, model: Model, status: HostStatus, reason: str = "") -> None:
        model.status, model.since, model.reason = status, time.monotonic(), reason
        if status is HostStatus.READY:
            model.parks = False
        self._changed.set()
        log.info("host.model", extra={"model": model.name, "status": status})

    # -- what others are told ------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._changed.clear()
            try:
                self._told = self._state(time.monotonic())
                await self._bus.publish(subjects.host_heartbeat(self._host_id), self._told)
            except UnavailableError as error:
                log.debug("host.not_heard", extra={"error": error.message})
            try:
                await asyncio.wait_for(self._changed.wait(), BEAT_S)
            except TimeoutError:
                continue

    def _state(self, now: float) -> HostState:
        models = {name: self._extras.offer(model, now) for name, model in self._models.items()}
        return HostState(
            host=self._host_id,
            incarnation=self._incarnation,
            models=models,
            max_loaded=self._plan.max_loaded,
            free_places=max(0, (self._plan.max_loaded or len(models)) - self._extras.places_taken()),
            free_cards=len(cards_of(self._plan.everybody()) - self._extras.cards_taken()),
            free_bytes=int(free) if (free := free_bytes()) < math.inf else 0,
            shares=True,
        )

    def _view(self, name: str, model: Model, now: float) -> ModelView:
        model.wishes = {gateway: wish for gateway, wish in model.wishes.items() if wish.until > now}
        wishes = [wish for wish in model.wishes.values() if wish.active or not wish.dismissed]
        if wishes and model.status in NOT_HERE and self._leaves(name, now):
            wishes = []
        parks_s = self._plan.parks_s if model.told_s is None else model.told_s
        return ModelView(
            status=model.status,
            since=model.since,
            wanted_until=max((wish.until for wish in wishes), default=-math.inf),
            wanted_since=min((wish.since for wish in wishes if wish.active), default=math.inf),
            active=any(wish.active for wish in wishes),
            active_at=model.active_at,
            parks_s=parks_s if model.can_park and not self._plan.stays_awake else 0.0,
            needs_bytes=model.needs_bytes,
        )

    def _leaves(self, name: str, now: float) -> bool:
        """True if another host should load a model, or may, for all that was heard so far."""
        others = [state for _, state in self._others.values()]
        is_told = name in self._told.models and now - self._began_at >= LISTEN_S
        return not is_told or bool(leaves_to(name, self._told, others))
