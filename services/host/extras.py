"""Workers that a host has beside those that start with a model: they come and go with the planner's counts.

A step is taken once it was the same for `SETTLE_S`, so that hosts have heard what each other began. Without a planner that acts
everything stays. A worker that fails is not started again at once, and its model goes on without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import PREFIX
from common.messages import HostedModel, HostState, PlannerState, WorkerState
from common.peers import PeerTable
from common.tasks import cancel_all
from common.words import HostStatus, Role
from services.host.child import Child, describe_exit, why_ended
from services.host.models import Model
from services.host.plan import HostedWorker, HostPlan, cards_of
from services.host.policy import TAKES_PLACE
from services.host.pulled import PulledModels
from services.host.room import free_bytes
from services.host.scaling import ROLES_OF, Change, change_of
from services.host.sharing import HAVE
from services.rank.cores import physical_cores

log = logging.getLogger("baton.host")

SETTLE_S = 1.0  # two heartbeats of a host
PLANNER_SILENT_S = 6.0  # three of its periods
FAILED_FOR_S = 60.0
STOP_MARGIN_S = 5.0  # added to the drain time before a worker is killed
MAX_PLANNERS = 100
MAX_REASON_CHARS = 400
NOBODY = Change()
ROLES = (Role.PREFILL, Role.DECODE, Role.POOL)


@dataclass(slots=True, eq=False)
class Extra:
    """A worker that came by the planner's count."""

    model: str
    worker: HostedWorker
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Task[None] | None = None  # its process's life


class Extras:
    """The workers of a host that come and go, and what it hears for them."""

    def __init__(
        self,
        plan: HostPlan,
        models: Mapping[str, Model],
        child: Callable[[HostedWorker], Child],
        changed: Callable[[], None],
        pulled: PulledModels | None = None,
    ) -> None:
        """`models`: the host's, which come and go. `changed()`: what it tells others did."""
        self._plan = plan
        self._models = models
        self._child = child
        self._changed = changed
        self._pulled = pulled
        self._cores = physical_cores()
        self._running: dict[str, Extra] = {}  # by name on the bus
        self._failed: dict[str, float] = {}  # likewise, and when
        self._fleet = PeerTable()
        self._planners: dict[str, tuple[float, PlannerState]] = {}
        self._due: dict[str, tuple[float, Change]] = {}  # by model: since when it is the same

    # -- what others say -----------------------------------------------------------------------------------------------

    def saw_worker(self, state: WorkerState, now: float) -> None:
        self._fleet.saw(state, now)

    def saw_planner(self, state: PlannerState, now: float) -> None:
        if state.planner in self._planners or len(self._planners) < MAX_PLANNERS:
            self._planners[state.planner] = now, state

    def _wanted(self, model: str, now: float) -> dict[str, int]:
        """The acting planner's counts of a model; empty where there are none."""
        self._planners = {name: one for name, one in self._planners.items() if now - one[0] < PLANNER_SILENT_S}
        acting = [state for _, state in self._planners.values() if state.acts]
        first = min(acting, key=lambda state: (state.planner, state.incarnation), default=None)
        return {} if first is None else first.wanted.get(model, {})

    # -- what follows --------------------------------------------------------------------------------------------------

    def follow(self, now: float, told: HostState, others: Iterable[HostState]) -> None:
        """Start and stop what is due. `told`: this host's state, as others heard it."""
        self._fleet.check(now)
        states = [told, *others]
        for model in [name for name in self._models if self._spares(name) or self._of(name)]:
            offers = {state.host: state.models[model] for state in states if model in state.models}
            change = self._change(told.host, model, offers, now)
            since, before = self._due.get(model, (now, NOBODY))
            self._due[model] = (since if change == before else now, change)
            if change == before != NOBODY and now - since >= SETTLE_S:
                del self._due[model]
                self._take(model, change, now)

    def _change(self, own: str, model: str, offers: Mapping[str, HostedModel], now: float) -> Change:
        statuses = {offer.status for offer in offers.values()}
        mine = tuple(name for name, extra in self._of(model) if not extra.leaving.is_set())
        if not statuses & {*HAVE}:
            return Change(stop=mine)
        wanted = self._wanted(model, now)
        if HostStatus.READY not in statuses or not wanted:
            return NOBODY
        return change_of(own, wanted, offers, self._elsewhere(model, offers, now))

    def _elsewhere(self, model: str, offers: Mapping[str, HostedModel], now: float) -> list[Sequence[str]]:
        hosted = set[str]().union(*(offer.workers for offer in offers.values()))
        ready = {state.worker: state for role in ROLES for state in self._fleet.ready(role, now)}
        return [one.roles for one in ready.values() if one.model == model and one.worker not in hosted]

    def _take(self, model: str, change: Change, now: float) -> None:
        for name in change.stop:
            if name in self._running:
                self._leave(self._running[name])
        for service in change.start:
            able = [worker for worker in self._startable(model, now) if worker.service == service]
            if able:
                self._start(model, able[0])
        self._changed()

    def _start(self, model: str, worker: HostedWorker) -> None:
        log.info("host.worker_starts", extra={"model": model, "worker": worker.id})
        extra = self._running[worker.id] = Extra(model, worker)
        if (found := self._models[model].found) is not None and self._pulled is not None:
            self._pulled.take(model, found)
        extra.running = asyncio.create_task(self._live(extra))

    def _leave(self, extra: Extra) -> None:
        if not extra.leaving.is_set():
            log.info("host.worker_stops", extra={"model": extra.model, "worker": extra.worker.id})
            extra.leaving.set()

    async def _live(self, extra: Extra) -> None:
        """The life of a worker, from its start until it is told to stop, or dies."""
        child, why = self._child(extra.worker), ""
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(extra.leaving.wait())]
        try:
            await child.start()
            ending = asyncio.create_task(child.wait())
            await asyncio.wait([*waiting, ending], return_when=asyncio.FIRST_COMPLETED)
            if not extra.leaving.is_set():
                why = f"{child.name} ended with {describe_exit(ending.result())}: {why_ended(child.log_file)}"
            waiting.append(ending)
        except OSError as error:
            why = f"{child.name} could not be started: {error.strerror}"
        finally:
            await cancel_all([task for task in waiting if not task.done()])
            await child.stop(timeout_s=self._plan.drain_s + STOP_MARGIN_S)
            if why:
                log.warning("host.worker_died", extra={"worker": child.name, "why": why[:MAX_REASON_CHARS]})
                self._failed[extra.worker.id] = time.monotonic()
            del self._running[extra.worker.id]
            if self._models[extra.model].found is not None and self._pulled is not None:
                self._pulled.give_back(extra.model)
            self._changed()

    def make_room(self, load: Model) -> bool:
        """Have workers of other models leave that hold a place, a GPU or memory of a model to load; True while they do."""
        others = [extra for extra in self._running.values() if extra.model != load.name]
        sleeps = load.status is HostStatus.PARKED  # it has its memory
        lacks_memory = bool(others) and not sleeps and load.needs_bytes > free_bytes()
        lacks_place = self.places_taken({load.name}) > (self._plan.max_loaded or len(self._models))
        cards = cards_of(self._next_workers(load))
        holding = [
            extra
            for extra in others
            if lacks_memory
            or (lacks_place and self._models[extra.model].status not in TAKES_PLACE)
            or cards & extra.worker.cards
        ]
        for extra in holding:
            self._leave(extra)
        return bool(holding)

    async def close(self) -> None:
        """Let all of them drain."""
        for extra in self._running.values():
            self._leave(extra)
        if tasks := [extra.running for extra in self._running.values() if extra.running is not None]:
            await asyncio.wait(tasks)

    # -- what others are told ------------------------------------------------------------------------------------------

    def places_taken(self, besides: Iterable[str] = ()) -> int:
        """Models that take a place here: loaded ones, those that are to be, and those with workers of this kind."""
        loaded = {name for name, model in self._models.items() if model.status in TAKES_PLACE}
        return len({*loaded, *besides, *(extra.model for extra in self._running.values())})

    def cards_taken(self) -> set[str]:
        """GPUs of loaded models, and of workers of this kind."""
        loaded = [worker for model in self._models.values() if model.status in TAKES_PLACE for worker in model.workers]
        return cards_of([*loaded, *(extra.worker for extra in self._running.values())])

    def offer(self, model: Model, now: float) -> HostedModel:
        """A model's part of the heartbeat."""
        mine = [(name, extra) for name, extra in self._of(model.name) if not extra.leaving.is_set()]
        workers = [*(model.workers if model.status in HAVE else ()), *(extra.worker for _, extra in mine)]
        return HostedModel(
            status=model.status,
            for_s=round(now - model.since, 2),
            reason=_line(model.reason),
            workers={worker.id: self._roles(model.name, worker) for worker in workers},
            spare=dict(Counter(worker.service for worker in self._startable(model.name, now))),
            extra=[name for name, _ in mine],
            wanted=self._wanted(model.name, now),
        )

    def _roles(self, model: str, worker: HostedWorker) -> list[str]:
        state = self._fleet.state_of(worker.id)
        starts_with = ROLES_OF.get(worker.service, ())
        return [str(role) for role in (state.roles if state is not None and state.model == model else starts_with)]

    def _startable(self, model: str, now: float) -> list[HostedWorker]:
        """Spare workers of a model for which this machine has room now."""
        spares = self._spares(model)
        if not spares or not self._takes_more(model):
            return []
        running = {name: workers for name, one in self._models.items() if (workers := self._here(name, one))}
        taken = cards_of(worker for name, workers in running.items() if name != model for worker in workers)
        cores = self._cores - sum(worker.threads for workers in running.values() for worker in workers)
        memory, found = free_bytes(), list[HostedWorker]()
        for worker in spares:
            fits = worker.needs_bytes <= memory and (not worker.threads or worker.threads <= cores)
            if fits and not self._is_held(worker, now) and not worker.cards & taken:
                memory, cores = memory - worker.needs_bytes, cores - worker.threads
                found.append(worker)
        return found

    def _spares(self, model: str) -> Sequence[HostedWorker]:
        found = self._models[model].found
        if found is None or self._pulled is None:
            return self._plan.spares.get(model, ())
        spares, own = self._pulled.spares(model, found), self._models[model].workers
        is_newer = any(worker.variables[f"{PREFIX}MODEL"] != str(found.folder) for worker in own)
        return () if is_newer else spares  # workers of one model have the same weights

    def _next_workers(self, model: Model) -> Sequence[HostedWorker]:
        """A model's workers, also if it has none yet because it is of the cache."""
        if model.found is None or self._pulled is None:
            return model.workers
        return model.workers or self._pulled.next_workers(model.name, model.found)

    def _takes_more(self, model: str) -> bool:
        """True if workers of a model may be started at all; none while one loads, whose memory is still free."""
        statuses = {name: one.status for name, one in self._models.items()}
        is_settled = HostStatus.LOADING not in statuses.values()
        may_run = statuses[model] in (HostStatus.READY, HostStatus.UNLOADED)
        return is_settled and may_run and self.places_taken({model}) <= (self._plan.max_loaded or len(self._models))

    def _is_held(self, worker: HostedWorker, now: float) -> bool:
        """True for a worker that runs, or failed a moment ago."""
        return worker.id in self._running or now - self._failed.get(worker.id, -FAILED_FOR_S) < FAILED_FOR_S

    def _here(self, name: str, model: Model) -> list[HostedWorker]:
        """A model's workers with a process here."""
        return [*(model.workers if model.children else ()), *(extra.worker for _, extra in self._of(name))]

    def _of(self, model: str) -> list[tuple[str, Extra]]:
        return [(name, extra) for name, extra in self._running.items() if extra.model == model]


def _line(text: str) -> str:
    """A reason as heartbeats may carry it."""
    return "".join(character if character.isprintable() else " " for character in text)[:MAX_REASON_CHARS]
