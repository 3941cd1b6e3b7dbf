"""One worker process: an engine, its block pool and transport, and the roles that share them.

Reading order: `WorkerHost.run` starts the device loop, the job intake, the frame outbox, heartbeats and the control
subject; roles (`prefill.role.PrefillRole`, `decode.role.DecodeRole`) attach before that. Which of them take new work may
change while the worker runs (`worker.roles`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from common import subjects
from common.blocks import hash_blocks, hash_root
from common.bus import Bus
from common.errors import PlaceAgainError, ServingError, UnavailableError
from common.lifecycle import cancel_all
from common.messages import (
    Ack,
    Cancel,
    Drain,
    GatewayState,
    KVLayout,
    Region,
    Resend,
    RolesReply,
    SetRoles,
    ToWorker,
    Trying,
    WorkerReply,
    WorkerState,
    gateway_state_decoder,
    to_worker_decoder,
)
from common.peers import Peers
from common.store import Store
from common.tracing import NoTracer, Tracer
from engine.block_pool import BlockPool
from engine.sequence import Sequence
from kvtransfer.transport import Transport
from worker.device import DeviceLoop, SteppingEngine
from worker.frames import FrameOutbox
from worker.index_news import IndexNews
from worker.jobs import ClaimedJob, JobIntake
from worker.ready import shown
from worker.roles import Role, Roles
from worker.totals import Totals

log = logging.getLogger("baton.worker")

HEARTBEAT_S = 0.5
REGISTER_S = 1.0
ANNOUNCE_S = 0.1
GATEWAY_SILENT_S = 5.0
DEVICE_CHECK_S = 0.25
NAMED_WITHIN_S = 0.5  # to the server; then the suspect is tried unnamed, or all would wait
FAREWELL_S = 2.0
EXIT_DEVICE_BROKEN = 70  # a supervisor may start the worker again; twice in a row means that the GPU is at fault
FENCE_AFTER_S = 3.0  # without the bus; others give the work away after 4 s


class WorkerEngine(SteppingEngine, Protocol):
    """What a worker needs of its engine besides stepping."""

    layout: KVLayout
    kv: torch.Tensor
    vocab_size: int
    max_model_len: int
    fingerprint: str

    @property
    def pass_ms(self) -> Mapping[tuple[int, int], float]:
        """See `DeviceLoop`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What may differ between two sane deployments of a worker."""

    served_model: str
    tokenizer_fingerprint: str
    max_batch_tokens: int = 512
    max_sequences: int = 64
    step_target_ms: float = 0.0  # of passes that decode while prompts are computed, in the mean; 0 = no matter
    alone_target_ms: float = 0.0  # the same while no worker prefills without decoding; 0 = `step_target_ms`
    step_timeout_s: float = 120.0  # a pass that takes longer will never end
    drain_s: float = 30.0
    ready_file: str = ""  # there while work is taken


def step_target_ms(settings: WorkerSettings, roles: Iterable[list[str]]) -> float:
    """While nobody computes prompts apart from decoding, steps may take longer: first tokens come from these steps, too."""
    apart = any("prefill" in some and "decode" not in some for some in roles)
    return settings.step_target_ms if apart else settings.alone_target_ms or settings.step_target_ms


class WorkerHost:
    """Owns what the roles share. Construct, `attach` roles, `run` until told to stop."""

    def __init__(
        self,
        *,
        bus: Bus,
        store: Store,
        peers: Peers,
        engine: WorkerEngine,
        transport: Transport,
        settings: WorkerSettings,
        worker_id: str,
        incarnation: int,
        tracer: Tracer | None = None,
    ) -> None:
        self.bus = bus
        self.store = store
        self.peers = peers
        self.engine = engine
        self.transport = transport
        self.settings = settings
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.tracer = tracer or NoTracer()
        self.totals = Totals()
        self.pool = BlockPool(num_blocks=engine.layout.num_blocks, block_size=engine.layout.block_size)
        self.device = DeviceLoop(
            engine=engine,
            token_budget=settings.max_batch_tokens,
            step_target_ms=settings.step_target_ms,
            step_timeout_s=settings.step_timeout_s,
            pass_ms=engine.pass_ms,
            announce=self._name_suspect,
        )
        self.outbox = FrameOutbox(bus=bus, worker_id=worker_id, incarnation=incarnation)
        self.jobs = JobIntake(
            bus=bus, worker_id=worker_id, incarnation=incarnation, room=self._room, start=self._start_job
        )
        self.region: Region | None = None
        self.status = "starting"
        self._stopping = False
        self.link_bytes_per_s = 0.0  # of the slowest measured link to a decode worker
        self.roles = Roles(hands_over=lambda: self.region is None or self.region.transport != "local")
        self._changing_roles = asyncio.Lock()
        self._gateways_seen: dict[str, tuple[int, float]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._news = IndexNews(self.pool)
        self._connected_at = time.monotonic()

    def attach(self, role: Role, *, active: bool = True) -> None:
        """Add a role. Decode attaches first, so that running sequences get their tokens first."""
        self.roles.attach(role, active=active)
        self.device.attach(role, backlog=lambda: role.load().queued_tokens)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine beside the loop; an exception is logged, never lost."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then drain: claim no more, finish what runs, leave the registry."""
        self.region = await self.transport.open(self.engine.kv, self.engine.layout, self.incarnation)
        await self.bus.serve(subjects.worker(self.worker_id), to_worker_decoder, self._handle)
        await self.bus.subscribe(subjects.ALL_GATEWAY_HEARTBEATS, gateway_state_decoder, self._gateway_seen)
        self.peers.on_lost(self._worker_lost)
        self.peers.on_joined(self._worker_joined)
        for role in self.roles.active:  # those who were heard before had nobody to be told to
            await role.prepare()
        await self._first_registration()
        loops = [
            self.spawn(loop)
            for loop in (
                self.device.run(),
                self.outbox.run(),
                self.jobs.keep_alive(),
                self._every(HEARTBEAT_S, self._beat),
                self._every(REGISTER_S, self._register),
                self._every(ANNOUNCE_S, self._announce),
                self._every(REGISTER_S, self._watch),
                self._every(DEVICE_CHECK_S, self._watch_device),
            )
        ]
        log.info("worker.ready", extra={"worker": self.worker_id, "roles": self.roles.names})
        try:
            with shown(self.settings.ready_file):
                await self.jobs.run(stopping)
            await self._drain()
        finally:
            await self._leave(loops)

    async def _first_registration(self) -> None:
        """Be in the registry before anybody is told to place work here; without Redis be ready all the same."""
        self.status = "ready"
        try:
            await self._register()
        except UnavailableError as error:
            log.warning("worker.not_registered", extra={"error": error.message})

    def state(self) -> WorkerState:
        """What this worker tells the others."""
        assert self.region is not None
        loads = [role.load() for role in self.roles.all]
        return WorkerState(
            worker=self.worker_id,
            incarnation=self.incarnation,
            roles=self.roles.names,
            status=self.status,
            model=self.settings.served_model,
            model_fingerprint=self.engine.fingerprint,
            tokenizer_fingerprint=self.settings.tokenizer_fingerprint,
            vocab_size=self.engine.vocab_size,
            max_model_len=self.max_model_len,
            region=self.region,
            parity_hash=parity_hash(self.engine.fingerprint, self.engine.layout),
            steps=self.device.steps,
            busy=self.device.busy,
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            queued_tokens=sum(load.queued_tokens for load in loads),
            held_blocks=sum(load.held_blocks for load in loads),
            free_blocks=self.pool.num_free,
            max_sequences=self.settings.max_sequences,
            prefill_tokens_per_s=self.device.prefill_tokens_per_s,
            decode_step_ms=self.device.decode_step_ms,
            prefill_fixed_ms=self.device.prefill_fixed_ms,
            prefill_bare_tokens_per_s=self.device.prompt_cost.tokens_per_s,
            prefill_bare_fixed_ms=self.device.prompt_cost.fixed_ms,
            prefill_double_tokens=self.device.prompt_cost.double_tokens,
            local_tokens_per_s=self.device.local_tokens_per_s,
            link_bytes_per_s=self.link_bytes_per_s,
            totals=self.totals.as_message(
                preemptions=sum(load.preemptions for load in loads),
                bad_digests=sum(load.bad_digests for load in loads),
                expired_jobs=self.jobs.expired,
                lost_frames=self.outbox.lost_frames,
                malformed=self.bus.malformed,
                dead_letters=self.bus.dead_letters,
            ),
        )

    @property
    def max_model_len(self) -> int:
        """The longest sequence that this worker can hold at all: the model's limit or the pool's."""
        return min(self.engine.max_model_len, self.pool.num_blocks * self.pool.block_size)

    # -- jobs and control ------------------------------------------------------------------------------------------

    def _room(self) -> int:
        return max((role.room() for role in self.roles.active), default=0) if self.status == "ready" else 0

    async def _start_job(self, claimed: ClaimedJob) -> None:
        self._gateways_seen.setdefault(claimed.job.gateway, (0, time.monotonic()))
        for role in self.roles.active:
            if role.takes(claimed.job):
                await role.start(claimed)
                return
        message = f"{self.worker_id} has the roles {', '.join(self.roles.names)} now"
        await self.jobs.fail(claimed, code=PlaceAgainError.code, message=message, retryable=True)

    def takes(self, role: str) -> bool:
        """Whether this worker takes new work of `role`."""
        return self.status == "ready" and role in self.roles.names

    async def _handle(self, message: ToWorker) -> WorkerReply | None:
        if isinstance(message, SetRoles):
            return await self._set_roles(message)
        if isinstance(message, Drain):
            return await self._set_draining(message)
        replies = [await role.handle(message) for role in self.roles.all]
        answers = [reply for reply in replies if reply is not None]
        if isinstance(message, Cancel | Resend):
            return Ack(known=any(isinstance(answer, Ack) and answer.known for answer in answers))
        return answers[0] if answers else Ack(known=False)

    async def _set_roles(self, message: SetRoles) -> RolesReply:
        """Change the roles, and answer when everybody was told."""
        async with self._changing_roles:
            refusal = self.roles.refusal(message.roles) if self.status == "ready" else f"the worker is {self.status}"
            if refusal:
                log.warning("worker.roles_refused", extra={"roles": message.roles, "why": refusal})
                return RolesReply(accepted=False, roles=self.roles.names, reason=refusal)
            before = self.roles.names
            if await self.roles.change(message.roles):
                extra = {"before": before, "now": self.roles.names, "why": message.reason}
                log.info("worker.roles_changed", extra=extra)
                self.jobs.room_changed()
                await self._tell()
            return RolesReply(accepted=True, roles=self.roles.names)

    async def _set_draining(self, message: Drain) -> RolesReply:
        """Take no new work, or take it again, and answer when everybody was told."""
        async with self._changing_roles:
            if self._stopping or self.status == "starting":
                why = "is stopping" if self._stopping else "is starting"
                return RolesReply(accepted=False, roles=self.roles.names, reason=f"the worker {why}")
            status = "draining" if message.draining else "ready"
            if status != self.status:
                self.status = status
                log.info("worker.drained" if message.draining else "worker.resumed", extra={"why": message.reason})
                self.jobs.room_changed()
                await self._tell()
            return RolesReply(accepted=True, roles=self.roles.names)

    async def _tell(self) -> None:
        """Let gateways, workers and the registry know at once what this worker takes; the next beats repeat it."""
        for telling in (self._beat, self._register):
            with contextlib.suppress(UnavailableError):
                await telling()

    async def _name_suspect(self, suspect: Sequence) -> None:
        """Tell the gateways that have suspects here who is tried next: after this worker's death they know who killed it."""
        trying = Trying(
            request_id=suspect.request_id,
            attempt=suspect.attempt,
            traceparent=self.device.trials.context(suspect),
            worker=self.worker_id,
            incarnation=self.incarnation,
        )
        with contextlib.suppress(UnavailableError):
            for gateway in self.device.trials.gateways:
                await self.bus.publish(subjects.gateway(gateway), trying)
            await self.bus.flush(
                NAMED_WITHIN_S
            )  # the server has it: a busy gateway's answer would hold up everybody here

    # -- liveness ----------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        self.device.step_target_ms = step_target_ms(
            self.settings, (state.roles for state in self.peers.states.values())
        )
        await self.bus.publish(subjects.heartbeat(self.worker_id), self.state())

    async def _register(self) -> None:
        if await self.store.register(self.state()):
            self._news.forget()

    async def _announce(self) -> None:
        """Keep the global index in step with the pool; after a flush or a lost call, tell everything again."""
        added, removed = self._news.next()
        if self._news.is_known and not added and not removed:
            return
        self._news.forget()
        await self.store.announce(self.worker_id, self.incarnation, added, removed)
        self._news.told()

    async def _watch(self) -> None:
        """Drop the requests of silent gateways; without the bus for too long, drop everything (others have given it away)."""
        now = time.monotonic()
        if self.bus.connected:
            self._connected_at = now
            for gateway, (_, seen_at) in list(self._gateways_seen.items()):
                if now - seen_at > GATEWAY_SILENT_S:
                    await self._gateway_lost(gateway)
        else:
            for gateway, (incarnation, _) in self._gateways_seen.items():
                self._gateways_seen[gateway] = (incarnation, now)  # their silence is ours
            if now - self._connected_at > FENCE_AFTER_S:
                for role in self.roles.all:
                    await role.cancel_all("worker lost the bus")

    async def _watch_device(self) -> None:
        """A device that computes no more has nothing to lose: say so, so that others take over at once, and end the process."""
        if not self.device.broken:
            return
        log.critical("worker.device_broken", extra={"worker": self.worker_id, "reason": self.device.broken})
        self.status = "broken"
        with contextlib.suppress(ServingError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._beat()
                await self.store.unregister(self.worker_id, self.incarnation)
                await asyncio.sleep(0.05)  # the client's own task writes what was published
        self._end_process()

    def _end_process(self) -> None:
        os._exit(EXIT_DEVICE_BROKEN)  # a thread that waits for the device can't be ended otherwise

    def _gateway_seen(self, state: GatewayState) -> None:
        if state.kept_traces:
            kept = state.kept_traces.hex()
            self.tracer.keep(kept[at : at + 32] for at in range(0, len(kept) - 31, 32))
        known = self._gateways_seen.get(state.gateway)
        self._gateways_seen[state.gateway] = (state.incarnation, time.monotonic())
        if known is None:
            self.spawn(self._beat_once())
        elif known[0] not in (0, state.incarnation):
            self.spawn(self._cancel_gateway(state.gateway))

    async def _gateway_lost(self, gateway: str) -> None:
        del self._gateways_seen[gateway]
        await self._cancel_gateway(gateway)

    async def _cancel_gateway(self, gateway: str) -> None:
        log.warning("gateway.lost", extra={"gateway": gateway})
        for role in self.roles.all:
            await role.cancel_all("gateway lost", gateway=gateway)

    def _worker_joined(self, state: WorkerState) -> None:
        """Answer a newcomer with a heartbeat at once, and let the roles connect to it before a request needs that."""
        if state.worker != self.worker_id:
            self.spawn(self._beat_once())
            for role in self.roles.all:
                role.worker_joined(state)

    async def _beat_once(self) -> None:
        with contextlib.suppress(UnavailableError):
            await self._beat()

    def _worker_lost(self, worker: str, incarnation: int) -> None:
        for role in self.roles.all:
            role.worker_lost(worker, incarnation)

    # -- life --------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        self.status, self._stopping = "draining", True
        with contextlib.suppress(ServingError):
            await self._beat()
        await self.jobs.close()
        give_up_at = time.monotonic() + self.settings.drain_s
        while not all(role.idle() for role in self.roles.all) and time.monotonic() < give_up_at:
            await asyncio.sleep(0.05)
        if not all(role.idle() for role in self.roles.all):  # their gateways start them again elsewhere
            state = self.state()
            log.warning(
                "worker.grace_over", extra={"worker": self.worker_id, "requests": state.running + state.waiting}
            )
        for role in self.roles.all:
            await role.cancel_all("worker stopped")
            await role.close()
        await self.outbox.flush()

    async def _leave(self, loops: list[asyncio.Task[Any]]) -> None:
        self.status = "stopped"
        await cancel_all(loops)
        with contextlib.suppress(ServingError):
            await self._beat()
        with contextlib.suppress(ServingError):
            await self.store.unregister(self.worker_id, self.incarnation)
        await self.transport.close()

    async def _every(self, period_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await action()
            except UnavailableError as error:
                log.debug("worker.unavailable", extra={"action": action.__name__, "error": error.message})
            except Exception:
                log.exception("worker.loop_failed", extra={"action": action.__name__})
            await asyncio.sleep(period_s)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("worker.task_failed", exc_info=task.exception())


def parity_hash(fingerprint: str, layout: KVLayout) -> bytes:
    """The block hash of the probe prompt `0, 1, …` of two blocks: a gateway that computes another one must not place here."""
    root = hash_root(model=fingerprint, kv_dtype=layout.dtype, block_size=layout.block_size)
    return hash_blocks(root, range(2 * layout.block_size), layout.block_size)[-1]
