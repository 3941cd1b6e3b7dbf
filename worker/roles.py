"""The roles of a worker as state: all of them are there from the start, and each takes new work or not.

    active ──lost──▶ retiring ──idle──▶ off
       ▲────────────────┴──gained────────┘

A retiring role finishes what it has begun: hand-overs go on, sequences decode to their end. It is part of every pass and
answers every message as before; only new work goes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages import Job, ToWorker, WorkerReply, WorkerState
from worker.device import Planner
from worker.jobs import ClaimedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """A role's share of the worker's load."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    held_blocks: int = 0
    preemptions: int = 0  # since the start
    bad_digests: int = 0  # likewise


class Role(Planner, Protocol):
    """Prefill or decode, as state of a worker."""

    name: str

    def takes(self, job: Job) -> bool:
        """Whether this role starts such a job."""
        ...

    def room(self) -> int:
        """Jobs that could start now."""
        ...

    async def prepare(self) -> None:
        """Get ready for new work, before anybody is told that it may come. Never raises."""
        ...

    async def start(self, claimed: ClaimedJob) -> None:
        """Begin a claimed job. Never raises: a job that can't start is failed."""
        ...

    async def handle(self, message: ToWorker) -> WorkerReply | None:
        """Answer a control message; None when it is not for this role or needs no answer."""
        ...

    def load(self) -> RoleLoad: ...

    async def cancel_all(self, reason: str, *, gateway: str | None = None) -> None:
        """Give up every request, or those of one gateway."""
        ...

    def worker_joined(self, state: WorkerState) -> None: ...

    def worker_lost(self, worker: str, incarnation: int) -> None: ...

    def idle(self) -> bool: ...

    async def close(self) -> None: ...


class Roles:
    """All roles of a worker in the order in which they plan, and which of them take new work."""

    def __init__(self, *, hands_over: Callable[[], bool]) -> None:
        """`hands_over()`: whether the worker's transport reaches other workers."""
        self._hands_over = hands_over
        self._roles: list[Role] = []
        self._active: set[str] = set()

    def attach(self, role: Role, *, active: bool) -> None:
        self._roles.append(role)
        if active:
            self._active.add(role.name)

    @property
    def all(self) -> list[Role]:
        return list(self._roles)

    @property
    def active(self) -> list[Role]:
        return [role for role in self._roles if role.name in self._active]

    @property
    def retiring(self) -> list[Role]:
        """Roles that take no new work and have some left."""
        return [role for role in self._roles if role.name not in self._active and not role.idle()]

    @property
    def names(self) -> list[str]:
        """The active roles' names."""
        return [role.name for role in self.active]

    def refusal(self, wanted: Sequence[str]) -> str:
        """Why the worker can't have these roles; "" if it can."""
        known = [role.name for role in self._roles]
        if not wanted:
            return "no role is given: a worker needs one; stop it if it shall do nothing"
        for name in wanted:
            if name not in known:
                return f"there is no role {name!r} here: choose from {', '.join(known)}"
        if "decode" not in wanted and not self._hands_over():
            return "prefill alone needs a transport that reaches other workers, and this one's is local"
        return ""

    async def change(self, wanted: Sequence[str]) -> bool:
        """Make `wanted`, which is not refused, the active roles; whether that changed anything.

        What is lost stops taking work when what is gained is prepared: until then somebody may need it.
        """
        if set(wanted) == self._active:
            return False
        gained = [role for role in self._roles if role.name in wanted and role.name not in self._active]
        for role in gained:
            await role.prepare()
        self._active = set(wanted)
        return True
