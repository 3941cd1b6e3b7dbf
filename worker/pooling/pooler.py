"""The role of a worker that pools: gateways ask, passes of all their inputs answer.

No request needs what is kept of another, so nothing is claimed, moved or fenced: a gateway without an answer asks another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from common import subjects
from common.bus import Bus
from common.errors import UnavailableError
from common.messages import (
    Ack,
    Cancel,
    Drain,
    FromGateway,
    KVLayout,
    Pool,
    Pooled,
    Region,
    RolesReply,
    SetRoles,
    WorkerState,
    WorkerTotals,
    pool_decoder,
    said_features,
    to_worker_decoder,
)
from common.tasks import cancel_all
from common.tracing import Tracer
from common.words import Role, WorkerStatus
from worker.context import every
from worker.identity import Identity
from worker.pooling.passes import Passes, Pools
from worker.probe_file import shown
from worker.settings import ModelIdentity

log = logging.getLogger("baton.worker")

HEARTBEAT_S = 0.5
DRAIN_CHECK_S = 0.02
WATCH_S = 0.25
NO_KV = KVLayout(num_blocks=1, num_layers=1, block_size=16, num_kv_heads=1, head_dim=1, dtype="float32")  # one block


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerSettings:
    """Settings of a worker that pools."""

    served: ModelIdentity
    max_batch_tokens: int
    step_timeout_s: float
    drain_s: float
    ready_file: str = ""


class Pooler:
    """Construct, and `run` until told to stop. `end_process()` is called when a pass never returns."""

    def __init__(
        self,
        *,
        bus: Bus,
        identity: Identity,
        engine: Pools,
        settings: PoolerSettings,
        end_process: Callable[[], None],
        tracer: Tracer | None = None,
    ) -> None:
        self._bus, self._identity, self._engine, self._settings = bus, identity, engine, settings
        self._end_process = end_process
        self._passes = Passes(engine, max_batch_tokens=settings.max_batch_tokens, tracer=tracer, worker=identity.worker)
        self._status = WorkerStatus.STARTING
        self._is_stopping = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then finish what waits."""
        worker = self._identity.worker
        await self._bus.serve(subjects.order(worker, subjects.ANY), pool_decoder, self.handle)
        await self._bus.serve(subjects.worker(worker), to_worker_decoder, self._asked_who_is_there)
        self._status = WorkerStatus.READY
        loops = [asyncio.create_task(loop) for loop in self._loops()]
        log.info("worker.ready", extra={"worker": worker, "roles": [Role.POOL]})
        try:
            with shown(self._settings.ready_file):
                await stopping.wait()
            await self._drain()
        finally:
            self._status = WorkerStatus.STOPPED
            await cancel_all(loops)
            with contextlib.suppress(UnavailableError):
                await self.beat()
                await self._bus.flush(HEARTBEAT_S)

    def _loops(self) -> list[Coroutine[Any, Any, None]]:
        return [self._passes.run(), every(HEARTBEAT_S, self.beat), every(WATCH_S, self._watch)]

    async def _drain(self) -> None:
        self._is_stopping, self._status = True, WorkerStatus.DRAINING
        with contextlib.suppress(UnavailableError):
            await self.beat()
        give_up_at = time.monotonic() + self._settings.drain_s
        while self._passes.answering and time.monotonic() < give_up_at:
            await asyncio.sleep(DRAIN_CHECK_S)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _asked_who_is_there(self, message: object) -> Ack:
        """Answer whoever wants this worker's name."""
        return Ack(known=False)

    async def handle(self, message: Pool | FromGateway) -> Pooled | RolesReply | Ack:
        match message:
            case Pool():
                if self._is_stopping:
                    return Pooled(code=UnavailableError.code, message=f"{self._identity.worker} is stopping")
                return await self._passes.answer(message)
            case Cancel():
                return Ack(known=self._passes.cancel(message.request_id))
            case Drain():
                return await self._set_draining(message)
            case SetRoles():
                why = f"a worker that pools has the role {Role.POOL}, by its model"
                return RolesReply(accepted=False, roles=[Role.POOL], reason=why)
        return Ack(known=False)

    async def _set_draining(self, message: Drain) -> RolesReply:
        if self._is_stopping:
            return RolesReply(accepted=False, roles=[Role.POOL], reason="the worker is stopping")
        self._status = WorkerStatus.DRAINING if message.draining else WorkerStatus.READY
        with contextlib.suppress(UnavailableError):
            await self.beat()
        return RolesReply(accepted=True, roles=[Role.POOL])

    # -- what others see ----------------------------------------------------------------------------------------------

    def state(self) -> WorkerState:
        served, passes = self._settings.served, self._passes
        waiting = len(passes.queue)
        return WorkerState(
            worker=self._identity.worker,
            incarnation=self._identity.incarnation,
            roles=[Role.POOL],
            status=self._status,
            model=served.name,
            model_fingerprint=self._engine.fingerprint,
            tokenizer_fingerprint=served.tokenizer_fingerprint,
            files_fingerprint=served.files_fingerprint,
            vocab_size=self._engine.vocab_size,
            max_model_len=self._engine.max_model_len,
            region=Region(transport="none", incarnation=self._identity.incarnation, layout=NO_KV, address={}),
            steps=passes.steps,
            busy=bool(self._passes.running or waiting),
            running=len(self._passes.running),
            waiting=waiting,
            queued_tokens=passes.queue.tokens,
            prefill_tokens_per_s=self._passes.tokens_per_s,
            totals=WorkerTotals(
                prompt_tokens=passes.tokens,
                cached_tokens=passes.found,
                failed_steps=self._passes.failed,
                dropped_inputs=passes.queue.dropped,
                malformed=self._bus.malformed,
                dead_letters=self._bus.dead_letters,
                forged=self._bus.forged,
                pass_s=self._passes.pass_s,
            ),
            **said_features(),
        )

    async def beat(self) -> None:
        await self._bus.publish(subjects.heartbeat(self._identity.worker), self.state())

    async def _watch(self) -> None:
        """End the process if the device is broken: others answer then."""
        reason = self._passes.broken(self._settings.step_timeout_s)
        if not reason:
            return
        log.critical("worker.device_broken", extra={"worker": self._identity.worker, "reason": reason})
        self._status = WorkerStatus.BROKEN
        with contextlib.suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self.beat()
                await self._bus.flush(HEARTBEAT_S)
        self._end_process()
