"""The roles of a worker as state: all exist from the start, and each may take new work or not.

    active ──lost──▶ retiring ──idle──▶ off
       ▲────────────────┴──gained────────┘

A retiring role finishes what it has begun: it is part of every pass and answers every message, but gets no new work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from common import words
from common.messages import Job, TokenLogprobs, ToWorker, WorkerReply, WorkerState
from common.words import WorkerStatus
from engine.sequence import Sequence as TokenSequence
from worker.device.pipeline import Planner
from worker.serving.jobs import ClaimedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """A role's share of the worker's load."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    held_blocks: int = 0
    preemptions: int = 0  # since the worker started
    bad_digests: int = 0  # likewise
    link_bytes_per_s: float = 0.0  # the slowest measured link to a decode worker; 0 = none


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A prompt computed by one role, with first token and blocks, offered to another role of the same worker.

    `deadline_at` is in `time.monotonic()`, `logprobs` are the first token's, and `cached_tokens` counts the prompt's.
    """

    job: Job
    sequence: TokenSequence
    deadline_at: float
    logprobs: list[TokenLogprobs]
    cached_tokens: int


class CancelReason(Enum):
    """A reason to cancel requests that could have continued."""

    GATEWAY_LOST = "gateway lost"
    BUS_LOST = "worker lost the bus"
    WORKER_STOPPED = "worker stopped"


class Role(Planner, Protocol):
    """Prefill or decode, as state of a worker."""

    name: words.Role

    def takes(self, job: Job) -> bool:
        """True if this role starts such a job."""
        ...

    def room(self) -> int:
        """Jobs that could start now."""
        ...

    async def prepare(self) -> None:
        """Get ready for new work before it is announced. Never raises."""
        ...

    async def start(self, claimed: ClaimedJob) -> None:
        """Start a claimed job. Never raises: a job that can't start is failed."""
        ...

    def adopt(self, prompt: Computed) -> bool:
        """Take over another role's prompt together with its blocks; return False if impossible now."""
        ...

    async def handle(self, message: ToWorker) -> WorkerReply | None:
        """Handle a control message; return None if it is not for this role or needs no reply."""
        ...

    def load(self) -> RoleLoad: ...

    async def cancel_all(self, reason: CancelReason, *, gateway: str | None = None) -> None:
        """Cancel every request, or those of one gateway."""
        ...

    def worker_joined(self, state: WorkerState) -> None: ...

    def worker_lost(self, worker: str, incarnation: int) -> None: ...

    def idle(self) -> bool: ...

    async def close(self) -> None: ...


class Roles:
    """All roles of a worker in planning order, and which of them take new work.

    `status`: starting -> ready, then draining and ready again on order, at the end stopped or broken.
    """

    def __init__(self, *, hands_over: bool) -> None:
        """`hands_over`: True if the worker's transport reaches other workers."""
        self.status: WorkerStatus = WorkerStatus.STARTING
        self._hands_over = hands_over
        self._roles: list[Role] = []
        self._active: set[words.Role] = set()

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
    def names(self) -> list[words.Role]:
        return [role.name for role in self.active]

    def takes(self, role: words.Role) -> bool:
        return self.status == WorkerStatus.READY and role in self.names

    def room(self) -> int:
        """Jobs that could start now."""
        return max((role.room() for role in self.active), default=0) if self.status == WorkerStatus.READY else 0

    def adopt(self, prompt: Computed) -> bool:
        """Have an active role continue the prompt; return False if none can now."""
        return self.status == WorkerStatus.READY and any(role.adopt(prompt) for role in self.active)

    def refusal(self, wanted: Sequence[str]) -> str:
        """Return why the worker can't have these roles; "" if it can."""
        known = [role.name for role in self._roles]
        if not wanted:
            return "no role is given: a worker needs one; stop it if it shall do nothing"
        for name in wanted:
            if name not in known:
                return f"there is no role {name!r} here: choose from {', '.join(known)}"
        if words.Role.DECODE not in wanted and not self._hands_over:
            return "prefill alone needs a transport that reaches other workers, and this one's is local"
        return ""

    async def change(self, wanted: Sequence[str]) -> bool:
        """Activate the roles `wanted`, which were checked by `refusal`; return True if anything changed.

        A lost role stops only when the gained one is prepared: until then it may be needed.
        """
        if set(wanted) == self._active:
            return False
        gained = [role for role in self._roles if role.name in wanted and role.name not in self._active]
        for role in gained:
            await role.prepare()
        self._active = {words.Role(name) for name in wanted}
        return True
