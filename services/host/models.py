"""A model of a host: gateways' wishes for it, its workers and processes, its status."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from common.words import HostStatus
from services.host.child import Child
from services.host.plan import HostedWorker
from services.host.pulled import Found
from services.host.suits import POOL


@dataclass(slots=True)
class Wish:
    """A gateway's wish for a model. `since`: unbroken."""

    until: float
    since: float
    active: bool
    dismissed: bool = False  # somebody asked to unload the model: only present and new requests count


@dataclass(slots=True, eq=False)
class Model:
    """A model of this host."""

    name: str
    workers: list[HostedWorker]
    needs_bytes: int = 0
    # A model of the cache, whose workers are those of a slot while it has one.
    found: Found | None = None
    status: HostStatus = HostStatus.UNLOADED
    since: float = 0.0
    reason: str = ""
    active_at: float = -math.inf
    ready: set[str] = field(default_factory=set)  # its workers that say so
    asleep: set[str] = field(default_factory=set)  # likewise
    parks: bool = False  # it goes to sleep, or sleeps
    told_s: float | None = None  # how long it sleeps by the last order; None: as planned
    children: list[Child] = field(default_factory=list)
    wishes: dict[str, Wish] = field(default_factory=dict)  # by gateway
    running: asyncio.Task[None] | None = None  # its processes' life
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def can_park(self) -> bool:
        """True if its workers can sleep as far as their service goes: those that pool can't."""
        return all(worker.service != POOL for worker in self.workers)
