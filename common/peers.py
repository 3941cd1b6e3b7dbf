"""The table of live workers, built from heartbeats. Gateways place by it when Redis is down; workers learn which peers died.

After 3 s of silence a worker is lost. A new incarnation under the same name ends the old one at once. When the old one beats
again, two processes have the name: it gets no work while both do. A worker that beats while its device loop stands still with
work to do is stuck, which counts as dead.

When all fall silent at once, the bus or this process is the likelier cause: then they get twice the time, in which
the bus's own pings find out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from common import subjects
from common.bus import Bus, Subscription
from common.messages import Feature, WorkerState, worker_state_decoder
from common.words import Role, WorkerStatus

log = logging.getLogger("baton.peers")

DEAD_AFTER_S = 3.0
STUCK_AFTER_S = 20.0  # a single pass may take long on a CPU
CHECK_EVERY_S, QUIET_AFTER_S = 0.25, 1.2  # heartbeats come every 0.5 s

CONTESTED = "two processes have this name: end one, or start it under another"
MAX_LEFT = 1_000  # remembered incarnations that stopped when told to


class Incarnation(NamedTuple):
    """One life of a worker: a restart under the same name gets a new number."""

    worker: str
    number: int


def incarnation_of(state: WorkerState) -> Incarnation:
    return Incarnation(state.worker, state.incarnation)


LostCallback = Callable[[str, int], None]


@dataclass(slots=True)
class _Seen:
    state: WorkerState
    at: float
    moved_at: float  # when `steps` last changed or there was no work
    before: int = 0  # the incarnation that it replaced
    contested_at: float = -math.inf  # when the replaced one was heard again


class PeerTable:
    """The table without clock or I/O: heartbeats in, lost (worker, incarnation) pairs out."""

    def __init__(self, *, dead_after_s: float = DEAD_AFTER_S) -> None:
        self._dead_after_s = dead_after_s
        self._seen: dict[str, _Seen] = {}
        self._ready: dict[Role, tuple[float, list[WorkerState]]] = {}  # until when, unless somebody is heard or lost

    @property
    def states(self) -> dict[str, WorkerState]:
        """The last state of every worker that is not lost, by id."""
        return {worker: seen.state for worker, seen in self._seen.items()}

    def state_of(self, worker: str) -> WorkerState | None:
        """The last state of one worker that is not lost."""
        seen = self._seen.get(worker)
        return seen.state if seen is not None else None

    def saw(self, state: WorkerState, now: float) -> list[Incarnation]:
        """Take a heartbeat; return the incarnations that it proves dead."""
        self._ready.clear()
        known = self._seen.get(state.worker)
        if state.status.is_gone:
            if known is None or known.state.incarnation != state.incarnation:
                if known is not None and known.before == state.incarnation:
                    known.contested_at = -math.inf
                return []
            del self._seen[state.worker]
            return [incarnation_of(state)]
        if known is None:
            self._seen[state.worker] = _Seen(state, now, now)
            return []
        if known.state.incarnation == state.incarnation:
            if not (state.busy and state.steps == known.state.steps):
                known.moved_at = now
            known.state, known.at = state, now
            return []
        was_contested = self._is_contested(known, now)
        contested_at = now if known.before == state.incarnation else known.contested_at
        self._seen[state.worker] = _Seen(state, now, now, known.state.incarnation, contested_at)
        return [] if was_contested else [incarnation_of(known.state)]

    def contested(self, now: float) -> list[str]:
        """Names claimed by two processes."""
        return [worker for worker in self._seen if self.is_contested(worker, now)]

    def is_contested(self, worker: str, now: float) -> bool:
        return worker in self._seen and self._is_contested(self._seen[worker], now)

    def _is_contested(self, seen: _Seen, now: float) -> bool:
        return now - seen.contested_at < self._dead_after_s

    def check(self, now: float) -> list[Incarnation]:
        """Drop silent workers and return them. A stuck worker stays in the table, but is never `ready`."""
        everybody = len(self._seen) > 1 and self.silent_s(now) > self._dead_after_s
        dead_after_s = 2 * self._dead_after_s if everybody else self._dead_after_s
        lost = [seen for seen in self._seen.values() if now - seen.at > dead_after_s]
        if lost:
            self._ready.clear()
        for seen in lost:
            del self._seen[seen.state.worker]
        return [incarnation_of(seen.state) for seen in lost]

    def drop(self, worker: str) -> None:
        """Forget a worker; its next heartbeat joins it anew."""
        self._seen.pop(worker, None)
        self._ready.clear()

    def silent_s(self, now: float) -> float:
        """Seconds since the last heartbeat of any worker; 0 without workers."""
        return now - max((seen.at for seen in self._seen.values()), default=now)

    def ready(self, role: Role, now: float) -> list[WorkerState]:
        """Workers that take new work of `role`: the same list object until it changes."""
        until, ready = self._ready.get(role, (-math.inf, []))
        if now >= until:
            until, ready = math.inf, []
            for seen in self._seen.values():
                if role not in seen.state.roles or seen.state.status != WorkerStatus.READY:
                    continue
                stuck_at, settled_at = seen.moved_at + STUCK_AFTER_S, seen.contested_at + self._dead_after_s
                if now < stuck_at and now >= settled_at:
                    ready.append(seen.state)
                until = min(until, *(instant for instant in (stuck_at, settled_at) if now < instant), math.inf)
            self._ready[role] = until, ready
        return ready


class Peers:
    """The table, fed from the bus."""

    def __init__(self, *, dead_after_s: float = DEAD_AFTER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = PeerTable(dead_after_s=dead_after_s)
        self._clock = clock
        self._on_lost: list[LostCallback] = []
        self._on_joined: list[Callable[[WorkerState], None]] = []
        self._on_heard: list[Callable[[str], None]] = []
        self._on_changed: list[Callable[[WorkerState], None]] = []
        self._subscription: Subscription | None = None
        self._checker: asyncio.Task[None] | None = None
        self._bus: Bus | None = None
        self._deaf_since: float | None = None
        self._checked_at = clock()
        self._left: deque[Incarnation] = deque(maxlen=MAX_LEFT)

    @property
    def states(self) -> dict[str, WorkerState]:
        return self._table.states

    def to(self, worker: str, speaker: str, subject: Callable[[str, str], str]) -> str:
        """Subject on which a worker hears `speaker`: `subjects.peer` or `.order`, or release 0.1.0's."""
        return subjects.worker(worker) if self.speaks_unnamed(worker) else subject(worker, speaker)

    def speaks_unnamed(self, worker: str) -> bool:
        """True if this worker is of release 0.1.0, whose subjects carry no speaker."""
        known = self._table.state_of(worker)
        return known is not None and Feature.NAMED not in known.can

    def ready(self, role: Role) -> list[WorkerState]:
        """Workers that take new work of `role` now: the same list object until it changes."""
        return self._table.ready(role, self._clock())

    @property
    def hears_nobody(self) -> bool:
        """True if all workers are silent: the bus is suspect then, not one worker."""
        return self._table.silent_s(self._clock()) > QUIET_AFTER_S

    @property
    def contested(self) -> list[str]:
        """Names claimed by two processes now."""
        return self._table.contested(self._clock())

    def left(self, worker: str, incarnation: int) -> bool:
        """True if this worker left without dying: it was told to stop and did, or it only lost its name to another."""
        return (worker, incarnation) in self._left or self._is_contested(worker)

    def on_lost(self, callback: LostCallback) -> None:
        """Call `callback(worker, incarnation)` when a worker is lost."""
        self._on_lost.append(callback)

    def on_joined(self, callback: Callable[[WorkerState], None]) -> None:
        """Call `callback(state)` when a worker, or a new incarnation of one, is heard for the first time."""
        self._on_joined.append(callback)

    def on_heard(self, callback: Callable[[str], None]) -> None:
        """Call `callback(worker)` at each heartbeat except a worker's last."""
        self._on_heard.append(callback)

    def on_changed(self, callback: Callable[[WorkerState], None]) -> None:
        """Call `callback(state)` when a known worker's roles or status changed."""
        self._on_changed.append(callback)

    async def start(self, bus: Bus) -> None:
        """Listen for heartbeats and watch for silence."""
        self._bus = bus
        self._subscription = await bus.subscribe(subjects.ALL_HEARTBEATS, worker_state_decoder, self.saw)
        self._checker = asyncio.create_task(self._check_often())

    async def close(self) -> None:
        """Stop listening."""
        if self._checker is not None:
            self._checker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._checker
        if self._subscription is not None:
            await self._subscription.close()

    def saw(self, state: WorkerState) -> None:
        known, was_contested = self._table.state_of(state.worker), self._is_contested(state.worker)
        if state.status == WorkerStatus.STOPPED:
            self._left.append(incarnation_of(state))
        lost = self._table.saw(state, self._clock())
        if not was_contested and self._is_contested(state.worker):
            log.error("peer.contested", extra={"worker": state.worker, "remedy": CONTESTED})
        self._tell(lost)
        if state.status.is_gone:
            return  # listeners already know that it is lost
        for heard in self._on_heard:
            heard(state.worker)
        if known is None or known.incarnation != state.incarnation:
            for callback in self._on_joined:
                callback(state)
        elif (known.roles, known.status) != (state.roles, state.status):
            for callback in self._on_changed:
                callback(state)

    def drop(self, worker: str) -> None:
        """Drop a worker until its next heartbeat, without telling listeners: the caller knows better than this table."""
        self._table.drop(worker)

    def check(self) -> None:
        """Check for silence, unless this process itself lost the bus or was suspended."""
        now = self._clock()
        before, self._checked_at = self._checked_at, now
        stalled = now - before > DEAD_AFTER_S / 2
        if stalled or (self._bus is not None and not self._bus.connected):
            self._deaf_since = now
        if self._deaf_since is not None and now - self._deaf_since < DEAD_AFTER_S:
            return
        self._deaf_since = None
        self._tell(self._table.check(now))

    async def _check_often(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self.check()

    def _is_contested(self, worker: str) -> bool:
        return self._table.is_contested(worker, self._clock())

    def _tell(self, lost: list[Incarnation]) -> None:
        for worker, incarnation in lost:
            log.warning("peer.lost", extra={"worker": worker})
            for callback in self._on_lost:
                callback(worker, incarnation)
