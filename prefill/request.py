"""One request inside the prefill role."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from common.messages import AttemptMessage, Job, Tokens
from common.words import Finish
from engine.sequence import Sequence
from prefill.stop import Stop
from worker.serving.jobs import ClaimedJob


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """A claimed job with its sequence. `changed` is set whenever its handoff may have to act."""

    claimed: ClaimedJob
    sequence: Sequence
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: bool = False  # holds blocks
    started_at: float = 0.0  # first chunk planned
    chunks: list[tuple[float, int]] = field(default_factory=list)  # when each was computed, and its tokens
    first_token: int | None = None
    first_token_at: float = 0.0
    told: Tokens | None = None  # the first token as sent to the gateway
    finish: Finish = Finish.NONE  # set with the first token if the request ends there
    waits_for_room: bool = False  # every candidate is full
    asked_all: bool = False  # each candidate was asked once
    is_adopted: bool = False  # this worker's decode role continues it, and owns its blocks
    decode_worker: str = ""  # the worker that granted the lease
    dead_worker: str = ""  # the decode worker that fell silent during the handoff
    stopped: Stop | None = None  # why the request was stopped; None while it runs
    detail: str = ""  # details of `stopped`, for people
    lost: set[tuple[str, int]] = field(default_factory=set)  # workers lost during this request, with their incarnations

    @property
    def job(self) -> Job:
        return self.claimed.job

    @property
    def id(self) -> str:
        return self.claimed.job.request_id

    def is_of(self, message: AttemptMessage) -> bool:
        """True if the message is about this attempt."""
        return (self.id, self.job.attempt) == (message.request_id, message.attempt)

    def may_write_into(self, worker: str) -> bool:
        """True if that worker granted its lease, or its reply is still unknown."""
        return self.decode_worker in ("", worker)

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.claimed.deadline_at

    @property
    def why_stopped(self) -> str:
        """The reason and its detail for people; "" while the request goes on."""
        if self.stopped is None:
            return ""
        return f"{self.stopped.text}: {self.detail}" if self.detail else self.stopped.text

    def stop(self, reason: Stop, detail: str = "") -> None:
        """Stop the request; the first reason stands."""
        if self.stopped is None:
            self.stopped, self.detail = reason, detail
        self.changed.set()
