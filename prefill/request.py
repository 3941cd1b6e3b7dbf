"""One request inside the prefill role."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from common.messages import Job, Tokens
from engine.sequence import Sequence
from worker.jobs import ClaimedJob


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """A claimed job with its sequence. `changed` is set whenever its hand-over may have something to do."""

    claimed: ClaimedJob
    sequence: Sequence
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: bool = False  # holds blocks
    in_flight: int = 0  # passes in flight with a chunk of the prompt; its blocks stay as long as there are any
    started_at: float = 0.0  # first chunk planned
    chunks: list[tuple[float, int]] = field(default_factory=list)  # when each was computed, and its tokens
    first_token: int | None = None
    first_token_at: float = 0.0
    told: Tokens | None = None  # what the gateway was told of the first token
    finish: str = ""  # set with the first token when the request ends with it
    dead_worker: str = ""  # the decode worker that fell silent over the hand-over
    stopped: str = ""  # why the request was given up; "" = it goes on

    lost: set[tuple[str, int]] = field(default_factory=set)  # (worker, incarnation) lost while this request ran

    @property
    def job(self) -> Job:
        return self.claimed.job

    @property
    def id(self) -> str:
        return self.claimed.job.request_id

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.claimed.deadline_at

    def stop(self, reason: str) -> None:
        """Give the request up; the first reason stands."""
        self.stopped = self.stopped or reason
        self.changed.set()
