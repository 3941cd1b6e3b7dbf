"""Models that hosts load when they are wanted: hosts' heartbeats, this gateway's wishes, and the requests that wait for one.

A wish is a part of each heartbeat of a gateway, and no order. So none is lost with a process: a host that starts again hears
all of them within a second, and those of a dead gateway end by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

from common import subjects
from common.bus import Bus
from common.errors import OverloadedError, UnavailableError
from common.messages import HostedModel, HostState, Unload, Want, host_reply_decoder
from common.words import HostStatus

FOREVER_S = 1e9
GONE_AFTER_S = 30.0  # a host that starts again is soon heard again
SILENT_S = 2.5  # the workers of such a host are gone
LOOK_EACH_S = 1.0  # a host that falls silent tells nothing
MAX_WAITING = 4096
ORDER_TIMEOUT_S = 2.0
_ORDER = (
    HostStatus.READY,
    HostStatus.LOADING,
    HostStatus.PARKED,
    HostStatus.UNLOADING,
    HostStatus.UNLOADED,
    HostStatus.FAILED,
)


class Hosts:
    """The hosts that this gateway hears, and its wishes."""

    def __init__(
        self,
        is_ready: Callable[[str], bool],
        bus: Bus,
        *,
        gateway_id: str,
        keep_s: float = FOREVER_S,
        called: Mapping[str, str] = MappingProxyType({}),
        running: Callable[[], Collection[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep_s`: how long a model stays after its last request. `called`: the workers' names of models, where they differ.

        `running()`: models with requests in flight.
        """
        self._is_ready = is_ready
        self._bus = bus
        self._gateway_id = gateway_id
        self._keep_s = keep_s
        self._called = dict(called)
        self._clock = clock
        self._seen: dict[str, tuple[float, HostState]] = {}
        self._until: dict[str, float] = {}
        self._kept_s: dict[str, float] = {}  # as a model's last request said
        self._waiting = Counter[str]()
        self._using = Counter[str]()  # requests that no waiting room counts
        self._running = running
        self.heard = False  # a host was heard
        self._changed = asyncio.Event()  # replaced each time that it is set
        self.news = asyncio.Event()  # set when a wish should be told at once

    # -- hosts ---------------------------------------------------------------------------------------------------------

    def saw(self, state: HostState) -> None:
        before = self._seen.get(state.host)
        self._seen[state.host], self.heard = (self._clock(), state), True
        if before is None or _statuses(before[1]) != _statuses(state):
            self.changed()

    def changed(self) -> None:
        """Have the requests that wait look again: a host or a worker said something new."""
        told, self._changed = self._changed, asyncio.Event()
        told.set()

    def find(self, model: str) -> HostedModel | None:
        """The state of a model at the host where it is nearest to being ready; None if no host offers it."""
        if not self._seen:
            return None
        name, now = self.their_name(model), self._clock()
        self._seen = {host: seen for host, seen in self._seen.items() if now - seen[0] < GONE_AFTER_S}
        found = [state.models[name] for _, state in self._seen.values() if name in state.models]
        known = [one for one in found if one.status in _ORDER]
        return min(known, key=lambda one: _ORDER.index(one.status), default=None)

    def workers(self, model: str) -> dict[str, tuple[int, int | None]]:
        """A model's workers that run or start at all hosts, by role, and how many the planner wants; None: it tells nothing."""
        name, now = self.their_name(model), self._clock()
        live = [state.models[name] for at, state in self._seen.values() if now - at < SILENT_S and name in state.models]
        running = Counter(role for one in live for roles in one.workers.values() for role in roles)
        wanted: dict[str, int] = next((one.wanted for one in live if one.wanted), {})
        return {role: (running[role], wanted.get(role)) for role in sorted({*running, *wanted})}

    def their_name(self, model: str) -> str:
        """The workers' name of a model."""
        return self._called.get(model, model)

    def offers_any(self, models: Collection[str]) -> bool:
        return any(self.find(model) is not None for model in models)

    def must_load(self, model: str) -> bool:
        """True if a request for the model has to wait until a host has loaded it."""
        return not self._is_ready(model) and self.find(model) is not None

    def is_active(self, model: str) -> bool:
        """True if requests wait for a model or run here."""
        return self._waiting[model] > 0 or self._using[model] > 0 or model in self._running()

    def left_s(self, model: str) -> float | None:
        """Seconds until this gateway's wish for a model ends; None for a model that no host offers."""
        if self.find(model) is None:
            return None
        return max(0.0, self._until.get(model, 0.0) - self._clock())

    def said(self, model: str) -> str:
        """The state of a model, for people."""
        found = self.find(model)
        if found is None:
            return f"{model}: no host offers it"
        what = "waiting to be loaded" if found.status is HostStatus.UNLOADED else str(found.status)
        return f"{model}: {what}, {found.for_s:.0f} s" + (f" ({found.reason})" if found.reason else "")

    # -- wishes --------------------------------------------------------------------------------------------------------

    def used(self, model: str, keep_s: float | None = None) -> None:
        """Note a request; `keep_s`: how long it asks the model to stay after it."""
        if keep_s is not None:
            self._kept_s[model] = min(FOREVER_S, keep_s)
        self._until[model] = self._clock() + self._kept_s.get(model, self._keep_s)

    @contextlib.contextmanager
    def using(self, model: str) -> Iterator[None]:
        """Keep a model while a request is answered that no waiting room counts, as one for vectors."""
        self._using[model] += 1
        try:
            yield
        finally:
            self._using[model] -= 1
            self.used(model)

    async def load(self, model: str, keep_s: float | None = None) -> None:
        """Return once a model that hosts offer is ready. Raises UnavailableError if it can't be loaded, or OverloadedError."""
        if self.find(model) is None:
            return
        self.used(model, keep_s)
        if self._is_ready(model):
            return
        if self._waiting.total() >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} requests wait for models to be loaded")
        self._waiting[model] += 1
        self.news.set()
        try:
            while not self._is_ready(model):
                found = self.find(model)
                if found is None:
                    raise UnavailableError(f"no host offers model {model!r} any more")
                if found.status is HostStatus.FAILED:
                    raise UnavailableError(f"model {model!r} could not be loaded: {found.reason or 'see its log'}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), LOOK_EACH_S)
        finally:
            self._waiting[model] -= 1
            self.used(model)

    def wanted(self) -> dict[str, Want]:
        """The wishes for a heartbeat; none while no host was heard."""
        if not self.heard:
            return {}
        self._waiting, self._using = +self._waiting, +self._using
        now, active = self._clock(), {*self._running(), *self._using}
        self.news.clear()
        for model in active:
            self.used(model)
        self._until = {model: until for model, until in self._until.items() if until > now or self._waiting[model]}
        active = {*active, *self._waiting}
        told = {*active, *self._until}
        return {
            self._called.get(model, model): Want(
                keep_s=max(0.0, min(FOREVER_S, self._until.get(model, now) - now)), active=model in active
            )
            for model in told
            if self.find(model) is not None
        }

    async def unload(self, model: str, *, parks: bool = False) -> bool:
        """End this gateway's wish, and ask the hosts to unload the model unless it has requests. True if a host knows it.

        `parks`: to put it to sleep instead, where they can.
        """
        self._until.pop(model, None)
        self._kept_s.pop(model, None)
        self.news.set()
        name, told = self._called.get(model, model), False
        for host, (_, state) in list(self._seen.items()):
            if name in state.models:
                with contextlib.suppress(UnavailableError):
                    subject, order = subjects.host(host, self._gateway_id), Unload(model=name, parks=parks)
                    reply = await self._bus.request(subject, order, host_reply_decoder, timeout_s=ORDER_TIMEOUT_S)
                    told = told or reply.known
        return told


def _statuses(state: HostState) -> dict[str, HostStatus]:
    return {name: model.status for name, model in state.models.items()}
