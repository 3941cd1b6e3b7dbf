"""A worker's sleep: its weights stay in host memory, all other memory goes back to the system, and it takes no work.

    ready ──asked──▶ draining ──idle──▶ sleeping ──asked──▶ ready

What was cached is forgotten, so the prefix index finds nothing in a pool that was freed. The process, its name on the bus and
its links stay. On a GPU the weights move, and graphs are captured again: see `engine.weights.sleeping`. Its ranks, or stages,
sleep and wake with it, see `engine.lockstep`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, runtime_checkable

from common.words import WorkerStatus
from engine.cache.memory import EmptiedPool
from engine.parallel.group import RankLostError
from engine.weights.sleeping import Asleep
from kvtransfer.transports import frees_pools
from worker.context import RoleContext
from worker.control import Control
from worker.pulls.lender import Lender

log = logging.getLogger("baton.worker")

CHECK_S = 0.02


@runtime_checkable
class Sleeper(Protocol):
    """An engine that gives memory back, that of its other ranks too. No pass runs meanwhile. Both raise RankLostError."""

    def sleep(self, *, moves: bool) -> Asleep:
        """Free the pool and, if weights move, the device's memory. Raises MemoryError, awake."""
        ...

    def wake(self, asleep: Asleep) -> None:
        """Undo it. Raises MemoryError, asleep."""
        ...


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
        engine: object = None,
    ) -> None:
        """`tell`: see `Control`. `drain_s`: the longest wait for running requests; beyond it the worker stays awake.

        `engine`: on a GPU, and of several ranks, a `Sleeper`, or it can't sleep.
        """
        self._context, self._control, self._tell = context, control, tell
        self._drain_s, self._lender = drain_s, lender
        self._moves = context.cache.kv.device.type != "cpu"
        self._engine = engine if isinstance(engine, Sleeper) else None
        self._asleep: Asleep | None = None
        self._wanted = False
        self._asked = asyncio.Event()

    @property
    def refusal(self) -> str:
        """The reason that this worker can't sleep; "" if it can."""
        cache, transfers = self._context.cache, self._context.transfers
        if self._moves and self._engine is None:
            return f"its KV cache is in the memory of {cache.kv.device}, which is not given back"
        if self._moves and cache.tier is not None:
            return "its host memory tier (--kv-host-mb) knows its KV cache by address"
        if transfers.region.ranks and self._engine is None:
            return "nothing tells its further ranks"
        if not frees_pools(name := transfers.transport.name, "cuda" if self._moves else "cpu"):
            return f"peers know its KV cache by address (--transport {name}): take local"
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
                try:
                    await (self._sleep() if self._wanted else self._wake())
                except RankLostError as error:  # the worker ends, as after a pass
                    log.error("worker.rank_lost", extra={"why": str(error)})

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
        if is_idle and self._wanted and await self._freed():
            if not self._control.is_stopping:
                await self._now(WorkerStatus.SLEEPING)
            return
        if not is_idle:
            log.warning("worker.stays_awake", extra={"why": f"requests run for longer than {self._drain_s:g} s"})
        await self._awake()

    async def _freed(self) -> bool:
        """Give memory back; return False, with a log line, if the weights have no place in host memory."""
        self._context.cache.pool.clear()
        began = time.monotonic()
        try:
            self._asleep = await asyncio.to_thread(self._fall_asleep)
        except MemoryError as error:
            log.warning("worker.stays_awake", extra={"why": str(error)})
            return False
        if self._moves:
            extra = {"host_mb": self._asleep.num_bytes >> 20, "seconds": round(time.monotonic() - began, 2)}
            log.info("worker.moved_out", extra=extra)
        return True

    def _fall_asleep(self) -> Asleep:
        if self._engine is None:
            return EmptiedPool.fallen(self._context.cache.kv)
        return self._engine.sleep(moves=self._moves)

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
            await self._take_again()
        except MemoryError as error:
            log.error("worker.sleeps_on", extra={"why": str(error)})
            return
        await self._awake()

    async def _take_again(self) -> None:
        """Take the memory again. Raises MemoryError."""
        assert self._asleep is not None, "it sleeps"
        began = time.monotonic()
        wake = self._asleep.wake if self._engine is None else partial(self._engine.wake, self._asleep)
        await asyncio.to_thread(wake)
        self._asleep = None
        if self._moves:
            log.info("worker.moved_in", extra={"seconds": round(time.monotonic() - began, 2)})

    async def _awake(self) -> None:
        if self._lender is not None:
            self._lender.reopen()
        await self._now(WorkerStatus.READY)

    async def _now(self, status: WorkerStatus) -> None:
        self._context.roles.status = status
        log.info("worker.parking", extra={"worker": self._context.identity.worker, "status": status})
        self._context.jobs.room_changed()
        await self._tell()
