"""One worker process: an engine, its block pool and transport, and the roles that share them.

`Worker.run` starts the pipeline, the job intake, the frame outbox, heartbeats and the control subject; roles
(`prefill.role.PrefillRole`, `decode.role.DecodeRole`) attach before, each with the worker's `context`.

    pipeline    passes of the device                 heartbeat   this worker's state for others
    control     requests to this worker              fencing     whose requests end, and when all do
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from common import subjects
from common.errors import ServingError, UnavailableError
from common.messages import (
    GatewayState,
    KVLayout,
    WorkerState,
    from_gateway_decoder,
    from_peer_decoder,
    from_planner_decoder,
    gateway_state_decoder,
    to_worker_decoder,
)
from common.store import Store
from common.tasks import cancel_all
from common.tracing import NoTracer, Tracer
from common.words import WorkerStatus
from engine.cache.block_pool import BlockPool
from engine.cache.retention import POLICIES
from engine.grammars.grammars import Grammars
from kvtransfer.transport import Transfers, Transport
from kvtransfer.transports import reaches_others
from worker.context import Background, KVCache, Passes, RoleContext, ServedModel, Totals, every
from worker.control import Control
from worker.device.launcher import SteppingEngine, Threads
from worker.device.naming import Naming
from worker.device.pipeline import DeviceHealth, Pipeline
from worker.device.prompt_budget import PromptBudget
from worker.device.trials import Trials
from worker.events.building import published
from worker.fencing import Fencing, Heard
from worker.heartbeat import ANNOUNCE_S, HEARTBEAT_S, REGISTER_S, Heartbeat, Whole
from worker.identity import Messenger
from worker.parking import Parking
from worker.probe_file import shown
from worker.pulls.lender import Lender
from worker.pulls.puller import Puller
from worker.roles import CancelReason, Role, Roles
from worker.serving.allocation import longest_sequence
from worker.serving.jobs import FrameOutbox, JobIntake
from worker.serving.turns import Turns
from worker.settings import WorkerSettings
from worker.tier.building import host_tier
from worker.tier.ranks.asking import Asking
from worker.unnamed import Unnamed

log = logging.getLogger("baton.worker")

FENCE_CHECK_S = 1.0
DEVICE_CHECK_S = 0.25
DRAIN_CHECK_S = 0.05
FAREWELL_TIMEOUT_S = 2.0
EXIT_DEVICE_BROKEN = 70  # sysexits: a restart may help; twice suggests a bad GPU


class WorkerEngine(SteppingEngine, Protocol):
    """The worker's view of its engine besides stepping."""

    layout: KVLayout
    kv: torch.Tensor
    vocab_size: int
    max_model_len: int
    fingerprint: str
    launch_ms: float  # host time of an uncaptured pass
    grammars: Grammars

    @property
    def lost(self) -> str:
        """The reason that no further pass can be computed; "" while there is none."""
        ...

    @property
    def draft_ms(self) -> Mapping[int, float]:
        """Milliseconds of drafting behind a pass, by sequences that draft; empty where it isn't timed."""
        ...

    @property
    def pass_ms(self) -> Mapping[tuple[int, int], float]:
        """Milliseconds of timed passes, by slots (0: prompts alone) and prompt tokens; see `worker.device.costs`."""
        ...


def end_process() -> None:
    """Exit without waiting: a thread on a broken device never returns."""
    os._exit(EXIT_DEVICE_BROKEN)


async def let_go(transport: Transport) -> None:
    """Remove what a worker whose rank ended has in shared memory, within a bound: nobody else may start here."""
    try:
        async with asyncio.timeout(FAREWELL_TIMEOUT_S):
            await transport.close()
    except Exception as error:
        log.warning("worker.memory_left", extra={"error": str(error) or type(error).__name__})


class Worker:
    """Owns the parts that the roles share. Construct, `attach` roles, `run` until told to stop."""

    def __init__(
        self,
        *,
        messenger: Messenger,
        store: Store,
        engine: WorkerEngine,
        transfers: Transfers,
        settings: WorkerSettings,
        tracer: Tracer | None = None,
        threads: Threads | None = None,
        end_process: Callable[[], None] = end_process,
    ) -> None:
        """`end_process()` is called when the device is broken."""
        identity, bus, layout = messenger.identity, messenger.bus, engine.layout
        pool = BlockPool.of(layout, POLICIES[settings.kv_retention])
        tier = host_tier(
            engine,
            pool,
            settings.kv_host,
            settings.kv_disk,
            wake=lambda: self._pipeline.wake(),
            ask=Asking.of(transfers.transport),
        )
        self._events = None
        if settings.kv_events is not None:
            self._events = published(settings.kv_events, pool, layout, fingerprint=engine.fingerprint, tier=tier)
        trials, background = Trials(), Background()
        roles = Roles(hands_over=reaches_others(transfers.transport.name))
        jobs = JobIntake(bus=bus, identity=identity)
        self._settings = settings
        self._engine = engine
        self._end_process = end_process
        self._pipeline = Pipeline(
            engine=engine,
            budget=_budget(engine, settings),
            trials=trials,
            health=DeviceHealth(step_timeout_s=settings.step_timeout_s),
            announce=Naming(bus=bus, identity=identity, trials=trials).name,
            threads=threads,
            stages=settings.stages,
        )
        puller, self._lender, turns = None, None, Turns(changed=self._pipeline.wake)
        if settings.pulls and reaches_others(transfers.transport.name):
            puller = Puller(
                pool=pool,
                layout=layout,
                kv=engine.kv,
                messenger=messenger,
                transfers=transfers,
                cost=self._pipeline.budget.prompt_cost,
                spawn=background.spawn,
                wake=self._pipeline.wake,
            )
            self._lender = Lender(identity=identity, pool=pool, transfers=transfers, turns=turns, tier=tier)
        self.context = RoleContext(
            identity=identity,
            model=ServedModel(
                vocab_size=engine.vocab_size,
                max_model_len=min(engine.max_model_len, longest_sequence(pool)),
                max_sequences=settings.max_sequences,
                grammars=engine.grammars,
            ),
            cache=KVCache(
                layout=layout,
                kv=engine.kv,
                pool=pool,
                turns=turns,
                tier=tier,
                puller=puller,
            ),
            passes=Passes(
                wake=self._pipeline.wake,
                budget=self._pipeline.budget,
                trials=trials,
                stages=settings.stages,
                in_flight=lambda: self._pipeline.num_in_flight,
            ),
            jobs=jobs,
            outbox=FrameOutbox(bus=bus, identity=identity),
            messenger=messenger,
            transfers=transfers,
            roles=roles,
            background=background,
            totals=Totals(),
            tracer=tracer or NoTracer(),
        )
        whole = Whole.of(layout, engine.max_model_len)
        if self.context.model.max_model_len < whole.tokens:
            extra = {
                "max_model_len": self.context.model.max_model_len,
                "of": whole.tokens,
                "kv_memory_mb": whole.memory_mb,
            }
            log.warning("worker.context_cut", extra=extra)
        self.heartbeat = Heartbeat(
            self.context,
            pipeline=self._pipeline,
            store=store,
            settings=settings,
            fingerprint=engine.fingerprint,
            whole=whole,
        )
        self._fencing = Fencing(bus=bus, roles=roles, identity=identity)
        self.control = Control(
            identity=identity,
            roles=roles,
            jobs=jobs,
            fencing=self._fencing,
            tell=self.heartbeat.tell,
            called=pool.returning.called,
            lender=self._lender,
        )
        self.parking = Parking(
            self.context,
            self.control,
            tell=self.heartbeat.tell,
            drain_s=settings.drain_s,
            lender=self._lender,
            engine=engine,
        )

    @property
    def passes_in_flight(self) -> int:
        return self._pipeline.num_in_flight

    def attach(self, role: Role, *, active: bool = True) -> None:
        """Add a role. Decode attaches first, so that running sequences get their tokens first."""
        self.context.roles.attach(role, active=active)
        self._pipeline.attach(role, backlog=lambda: role.load().queued_tokens)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then drain: claim no more, finish running work, deregister."""
        context, roles = self.context, self.context.roles
        bus, peers = context.messenger.bus, context.messenger.peers
        worker = context.identity.worker
        anybody = subjects.ANY
        await bus.serve(subjects.peer(worker, anybody), from_peer_decoder, self.control.handle)
        await bus.serve(subjects.order(worker, anybody), from_gateway_decoder, self.control.handle)
        await bus.serve(subjects.plan(worker, anybody), from_planner_decoder, self.control.handle)
        unnamed = Unnamed(bus=bus, peers=peers, identity=context.identity, handle=self.control.handle)
        await bus.serve(subjects.worker(worker), to_worker_decoder, unnamed.handle)
        await bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self._gateway_seen)
        peers.on_lost(self._worker_lost)
        peers.on_joined(self._worker_joined)
        for role in roles.active:  # workers heard earlier had no listeners here
            await role.prepare()
        await self._first_registration()
        loops = [context.background.spawn(loop) for loop in self._loops()]
        log.info("worker.ready", extra={"worker": worker, "roles": roles.names})
        try:
            with shown(self._settings.ready_file):
                await context.jobs.run(stopping, room=roles.room, start=self.control.start_job)
            await self._drain()
        finally:
            await self._leave(loops)

    def _loops(self) -> list[Any]:
        return [
            self._pipeline.run(),
            self.context.outbox.run(),
            self.context.jobs.keep_alive(),
            self.parking.run(),
            every(HEARTBEAT_S, self.heartbeat.beat),
            every(REGISTER_S, self.heartbeat.register),
            every(ANNOUNCE_S, self.heartbeat.announce),
            every(FENCE_CHECK_S, self._fencing.watch),
            every(DEVICE_CHECK_S, self._watch_device),
        ]

    async def _first_registration(self) -> None:
        """Register before work may be placed here; without Redis become ready anyway."""
        self.context.roles.status = WorkerStatus.READY
        try:
            await self.heartbeat.register()
        except UnavailableError as error:
            log.warning("worker.not_registered", extra={"error": error.message})

    # -- what the worker hears -----------------------------------------------------------------------------------------

    def _gateway_seen(self, state: GatewayState) -> None:
        spawn = self.context.background.spawn
        if state.kept_traces:
            kept = state.kept_traces.hex()
            self.context.tracer.keep(kept[at : at + 32] for at in range(0, len(kept) - 31, 32))
        match self._fencing.saw(state):
            case Heard.NEW:
                spawn(self.heartbeat.beat_if_possible())
            case Heard.REPLACED:
                spawn(self._fencing.cancel(state.gateway))
            case Heard.KNOWN | Heard.CONTESTED:
                pass

    def _worker_joined(self, state: WorkerState) -> None:
        """Answer a new worker with a heartbeat, and connect the roles to it before a request needs the link."""
        if state.worker != self.context.identity.worker:
            self.context.background.spawn(self.heartbeat.beat_if_possible())
            for role in self.context.roles.all:
                role.worker_joined(state)

    def _worker_lost(self, worker: str, incarnation: int) -> None:
        for role in self.context.roles.all:
            role.worker_lost(worker, incarnation)
        if self.context.cache.puller is not None:
            self.context.cache.puller.worker_lost(worker, incarnation)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _watch_device(self) -> None:
        """Announce a broken device, so that others take over at once, and end the process."""
        lost = self._engine.lost if self.context.transfers.region.ranks else ""
        reason = lost or self._pipeline.broken
        if not reason:
            return
        extra = {"worker": self.context.identity.worker, "reason": reason}
        log.critical("worker.device_broken", extra=extra)
        self.context.roles.status = WorkerStatus.BROKEN
        with contextlib.suppress(ServingError, TimeoutError):
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await self.heartbeat.beat()
                await self.heartbeat.unregister()
                await asyncio.sleep(0.05)  # lets the client's own task write what was published
        if lost and self.context.cache.kv.device.type == "cpu":  # a copy on a broken device may never end
            await let_go(self.context.transfers.transport)
        self._end_process()

    async def _drain(self) -> None:
        roles = self.context.roles
        self.control.stop()
        with contextlib.suppress(ServingError):
            await self.heartbeat.beat()
        await self.context.jobs.close()
        give_up_at = time.monotonic() + self._settings.drain_s
        while not all(role.idle() for role in roles.all) and time.monotonic() < give_up_at:
            await asyncio.sleep(DRAIN_CHECK_S)
        if not all(role.idle() for role in roles.all):  # their gateways start them again elsewhere
            state = self.heartbeat.state()
            log.warning("worker.grace_over", extra={"worker": state.worker, "requests": state.running + state.waiting})
        for role in roles.all:
            await role.cancel_all(CancelReason.WORKER_STOPPED)
            await role.close()
        await self.context.outbox.flush()

    async def _leave(self, loops: list[asyncio.Task[Any]]) -> None:
        self.context.roles.status = WorkerStatus.STOPPED
        await cancel_all(loops)
        with contextlib.suppress(ServingError):
            await self.heartbeat.beat()
        with contextlib.suppress(ServingError):
            await self.heartbeat.unregister()
        if self._lender is not None:
            await self._lender.close()
        if self.context.cache.tier is not None:
            await asyncio.to_thread(self.context.cache.tier.close)
        if self._events is not None:
            await asyncio.to_thread(self._events.close)
        await self.context.transfers.transport.close()


def _budget(engine: WorkerEngine, settings: WorkerSettings) -> PromptBudget:
    if engine.pass_ms:
        timed = {f"{slots}+{tokens}": round(ms, 2) for (slots, tokens), ms in sorted(engine.pass_ms.items())}
        log.info("device.measured", extra={"pass_ms": timed, "launch_ms": round(engine.launch_ms, 2)})
    targets = settings.step_targets
    budget = PromptBudget(
        token_budget=settings.max_batch_tokens,
        target_ms=targets.shared_ms,
        pass_ms=engine.pass_ms,
        draft_ms=engine.draft_ms,
    )
    budget.launch_s = engine.launch_ms / 1000
    budget.follows_goals = targets.follow_goals
    return budget
