"""A role that computes nothing and keeps what it is told."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

from common.messages import Job, ToWorker, WorkerReply, WorkerState
from engine.engine import Chunk, Sampled
from worker.roles import CancelReason, Computed, RoleLoad
from worker.serving.jobs import ClaimedJob


class NotingRole:
    """`answer` is what it says to every message; it takes jobs as the role of its name does."""

    def __init__(self, name: str, *, answer: WorkerReply | None = None) -> None:
        self.name = name
        self.answer = answer
        self.started: list[Job] = []
        self.cancelled: list[tuple[CancelReason, str | None]] = []
        self.prepared = 0

    def takes(self, job: Job) -> bool:
        return bool(job.decode_workers) == (self.name == "prefill")

    def room(self) -> int:
        return 3

    async def prepare(self) -> None:
        self.prepared += 1

    async def start(self, claimed: ClaimedJob) -> None:
        self.started.append(claimed.job)

    def adopt(self, prompt: Computed) -> bool:
        return False

    async def handle(self, message: ToWorker) -> WorkerReply | None:
        return self.answer

    def load(self) -> RoleLoad:
        return RoleLoad()

    async def cancel_all(self, reason: CancelReason, *, gateway: str | None = None) -> None:
        self.cancelled.append((reason, gateway))

    def worker_joined(self, state: WorkerState) -> None: ...

    def worker_lost(self, worker: str, incarnation: int) -> None: ...

    def idle(self) -> bool:
        return True

    async def close(self) -> None: ...

    def plan(self, token_budget: int) -> list[Chunk]:
        return []

    def apply(self, results: ListOf[tuple[Chunk, Sampled | None]]) -> None: ...

    def failed(self, chunks: ListOf[Chunk], error: Exception) -> None: ...
