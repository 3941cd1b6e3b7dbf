"""Control messages of a worker: start a job, change roles, drain, and questions for its roles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from common.errors import PlaceAgainError
from common.messages import (
    Ack,
    Cancel,
    Drain,
    PullBlocks,
    PullReply,
    Received,
    Resend,
    RolesReply,
    SetRoles,
    StopPull,
    ToWorker,
    WorkerReply,
)
from common.words import WorkerStatus
from worker.fencing import Fencing
from worker.identity import Identity
from worker.pulls.lender import Lender
from worker.roles import Roles
from worker.serving.jobs import ClaimedJob, JobIntake

log = logging.getLogger("baton.worker")


class Control:
    """Passes jobs and messages to the roles, and changes which of them take work."""

    def __init__(
        self,
        *,
        identity: Identity,
        roles: Roles,
        jobs: JobIntake,
        fencing: Fencing,
        tell: Callable[[], Awaitable[None]],
        called: Callable[[str], None],
        lender: Lender | None = None,
    ) -> None:
        """`tell()`: announce to everybody which work this worker takes now. `called(request_id)`: heed the end by a call."""
        self._called = called
        self._lender = lender
        self._identity = identity
        self._roles = roles
        self._jobs = jobs
        self._fencing = fencing
        self._tell = tell
        self.is_stopping = False
        self.changing = asyncio.Lock()  # held while roles or status change

    async def start_job(self, claimed: ClaimedJob) -> None:
        """Pass a claimed job to the role that takes it, or return it to its gateway."""
        self._fencing.expect(claimed.job.gateway)
        for role in self._roles.active:
            if role.takes(claimed.job):
                await role.start(claimed)
                return
        message = f"{self._identity.worker} has the roles {', '.join(self._roles.names)} now"
        await self._jobs.fail(claimed, code=PlaceAgainError.code, message=message, retryable=True)

    async def handle(self, message: ToWorker) -> WorkerReply | None:
        """Handle a message and return the reply; None = no reply is needed."""
        if isinstance(message, SetRoles):
            return await self._set_roles(message)
        if isinstance(message, Drain):
            return await self._set_draining(message)
        if isinstance(message, PullBlocks | StopPull):
            return PullReply() if self._lender is None else await self._lender.handle(message)
        if isinstance(message, Received) and message.is_call:
            self._called(message.request_id)
        replies = [await role.handle(message) for role in self._roles.all]
        answers = [reply for reply in replies if reply is not None]
        if isinstance(message, Cancel | Resend):
            acks = [answer for answer in answers if isinstance(answer, Ack)]
            return Ack(known=any(ack.known for ack in acks), waits=any(ack.waits for ack in acks))
        return answers[0] if answers else Ack(known=False)

    def stop(self) -> None:
        """Stop taking work."""
        self.is_stopping = True
        self._roles.status = WorkerStatus.DRAINING

    async def _set_roles(self, message: SetRoles) -> RolesReply:
        """Change the roles, and reply once everybody was told."""
        roles = self._roles
        async with self.changing:
            refusal = (
                roles.refusal(message.roles) if roles.status == WorkerStatus.READY else f"the worker is {roles.status}"
            )
            if refusal:
                log.warning("worker.roles_refused", extra={"roles": message.roles, "why": refusal})
                return RolesReply(accepted=False, roles=roles.names, reason=refusal)
            before = roles.names
            if await roles.change(message.roles):
                extra = {"before": before, "now": roles.names, "why": message.reason}
                log.info("worker.roles_changed", extra=extra)
                self._jobs.room_changed()
                await self._tell()
            return RolesReply(accepted=True, roles=roles.names)

    async def _set_draining(self, message: Drain) -> RolesReply:
        """Start or end draining, and reply once everybody was told."""
        roles = self._roles
        async with self.changing:
            if self.is_stopping or roles.status in (WorkerStatus.STARTING, WorkerStatus.SLEEPING):
                why = "is stopping" if self.is_stopping else f"is {roles.status}"
                return RolesReply(accepted=False, roles=roles.names, reason=f"the worker {why}")
            status = WorkerStatus.DRAINING if message.draining else WorkerStatus.READY
            if status != roles.status:
                roles.status = status
                log.info("worker.drained" if message.draining else "worker.resumed", extra={"why": message.reason})
                self._jobs.room_changed()
                await self._tell()
            return RolesReply(accepted=True, roles=roles.names)
