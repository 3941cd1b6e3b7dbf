"""A worker's sleep: its weights stay in memory, its pool's memory goes back to the system, and it takes no work.

    ready ──asked──▶ draining ──idle──▶ sleeping ──asked──▶ ready

What was cached is forgotten, so the prefix index finds nothing in a pool that was freed. The process, its name on the bus and
its links stay.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from common.words import WorkerStatus
from engine.cache.memory import give_back, take_again
from kvtransfer.transports import frees_pools
from worker.context import RoleContext
from worker.control import Control
from worker.pulls.lender import Lender

log = logging.getLogger("baton.worker")

CHECK_S = 0.02


class Parking:
    """Puts a worker to sleep and wakes it, as `ask` says."""

    def __init__(
        self,
        context: RoleContext,
        control: Control,
        *,
        tell: Callable[[], Awaitable[None]],
        drain_s: float,
        lender: Lender | None = None,
    ) -> None:
        """`tell`: see `Control`. `drain_s`: the longest wait for running requests; beyond it the worker stays awake."""
        self._context, self._control, self._tell = context, control, tell
        self._drain_s, self._lender = drain_s, lender
        self._wanted = False
        self._asked = asyncio.Event()

    @property
    def refusal(self) -> str:
        """The reason that this worker can't sleep; "" if it can."""
        cache, transfers = self._context.cache, self._context.transfers
        if cache.kv.device.type != "cpu":
            return f"its KV cache is in the memory of {cache.kv.device}, which is not given back"
        if transfers.region.ranks:
            return "it has several ranks"
        if not frees_pools(transfers.transport.name):
            return f"transport {transfers.transport.name} keeps its KV cache registered"
        return ""

    def ask(self, sleeps: bool) -> None:
        """Note what is wanted of this worker; `run` follows."""
        self._wanted = sleeps
        self._asked.set()

    async def run(self) -> None:
        """Follow what is asked until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            async with self._control.changing:
                await (self._sleep() if self._wanted else self._wake())

    async def _sleep(self) -> None:
        roles, why = self._context.roles, self.refusal
        if roles.status not in (WorkerStatus.READY, WorkerStatus.DRAINING) or self._control.is_stopping:
            return
        if why:
            log.warning("worker.stays_awake", extra={"why": why})
            return
        await self._now(WorkerStatus.DRAINING)
        if self._lender is not None:
            await self._lender.close()
        is_idle = await self._idle()
        if self._control.is_stopping:
            return
        if is_idle and self._wanted:
            self._context.cache.pool.clear()
            await asyncio.to_thread(give_back, self._context.cache.kv)
            if not self._control.is_stopping:
                await self._now(WorkerStatus.SLEEPING)
            return
        if not is_idle:
            log.warning("worker.stays_awake", extra={"why": f"requests run for longer than {self._drain_s:g} s"})
        await self._awake()

    async def _idle(self) -> bool:
        """Wait until no request and no peer has a block; return False if that takes too long, or is wanted no more."""
        give_up_at = time.monotonic() + self._drain_s
        while self._wanted and not self._control.is_stopping and time.monotonic() < give_up_at:
            if all(role.idle() for role in self._context.roles.all) and not self._context.cache.pool.num_used:
                return True
            await asyncio.sleep(CHECK_S)
        return not self._wanted

    async def _wake(self) -> None:
        if self._context.roles.status is not WorkerStatus.SLEEPING:
            return
        try:
            await asyncio.to_thread(take_again, self._context.cache.kv)
        except MemoryError as error:
            log.error("worker.sleeps_on", extra={"why": str(error)})
            return
        await self._awake()

    async def _awake(self) -> None:
        if self._lender is not None:
            self._lender.reopen()
        await self._now(WorkerStatus.READY)

    async def _now(self, status: WorkerStatus) -> None:
        self._context.roles.status = status
        log.info("worker.parking", extra={"worker": self._context.identity.worker, "status": status})
        self._context.jobs.room_changed()
        await self._tell()
