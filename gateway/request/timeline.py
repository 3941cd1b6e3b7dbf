"""Timelines of recent requests: a `Timeline` for each choice, in bounded rings (docs/observability.md).

Instants are seconds of this gateway's monotonic clock; workers' durations are in milliseconds. The JSON has milliseconds since
the request was received.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from common.errors import ServingError
from common.messages import NO_GOAL, Goal, Imported, Settle, Tokens
from common.words import Finish
from gateway.request.attempt import WORKER_WAITS, AttemptLine, finite_ms, ms_since, rounded
from gateway.tenants.tenants import NOBODY, Tenant

MAX_ATTEMPTS = 32  # attempts in one timeline
MAX_FRAMES = 2048  # kept of one request, 8 bytes each
MAX_RECENT = 512
MAX_SLOWEST = 32
SLOWEST_FOR_S = 900.0
STOP_STRING = "stop string"  # `gateway.answers.choice` cancels with this reason; the request succeeded


class FramesSeen:
    """Times of frames and their token counts, as far as they are kept; drafts of all attempts.

    A worker's frames tell its totals of an attempt.
    """

    __slots__ = ("_attempt", "_pairs", "_told", "accepted", "drafted")

    def __init__(self) -> None:
        self.drafted = self.accepted = 0  # tokens that workers verified
        self._pairs = array("f")
        self._attempt, self._told = 0, (0, 0)

    def take(self, tokens: Tokens, ms: float, num_tokens: int) -> None:
        """Add a frame, `ms` after the request was received."""
        if tokens.attempt != self._attempt:
            self._attempt, self._told = tokens.attempt, (0, 0)
        drafted, accepted = max(tokens.drafted, self._told[0]), max(tokens.accepted, self._told[1])
        self.drafted += drafted - self._told[0]
        self.accepted += accepted - self._told[1]
        self._told = drafted, accepted
        self.add(ms, num_tokens)

    def add(self, ms: float, num_tokens: int) -> None:
        """Add a frame without further facts."""
        pairs = self._pairs
        if len(pairs) < 2 * MAX_FRAMES:
            pairs.append(ms)
            pairs.append(num_tokens)

    def as_json(self) -> dict[str, Any]:
        return {
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "frame_ms": [round(ms, 3) for ms in self._pairs[::2]],
            "frame_tokens": [int(count) for count in self._pairs[1::2]],
        }


@dataclass(slots=True, kw_only=True, eq=False)
class Timeline:
    """One choice of an answer, from its receipt to its last token."""

    request_id: str
    received_at: float  # when the HTTP request's head was read
    submitted_at: float  # when it was ready for admission
    prompt_tokens: int
    traceparent: str = ""  # the HTTP request's span, or the client's
    asker: Tenant = NOBODY
    model: str = ""  # name in the API
    patient: bool = False  # lowest tier: no service level is promised
    goal: Goal = NO_GOAL
    waited_ms: float = 0.0  # wait for admission
    ahead: int = 0  # waiting requests of its model at its arrival
    received_unix: float = field(default_factory=time.time)
    attempts: list[AttemptLine] = field(default_factory=list)
    dropped_attempts: int = 0  # attempts no longer listed
    finish: Finish = Finish.NONE  # from the last frame
    status: str = "running"  # "waiting", "running", "stop", "length", "cancelled", "error"
    detail: str = ""  # the error, or the reason for cancelling
    ended_at: float | None = None
    first_token_at: float | None = None
    first_sent_at: float | None = None  # when a stream's first text was sent
    cached_tokens: int = 0
    completion_tokens: int = 0
    phases: dict[str, float] = field(default_factory=dict)  # see `Generation.timings`; shared with the generation
    frames: FramesSeen = field(default_factory=FramesSeen)

    @property
    def tenant(self) -> str:
        return self.asker.name

    @property
    def attempt(self) -> AttemptLine | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def num_attempts(self) -> int:
        return len(self.attempts) + self.dropped_attempts

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_at is None else (self.first_token_at - self.received_at) * 1000

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first, up to now or the end; None before there is one."""
        if self.first_token_at is None or self.completion_tokens < 2:
            return None
        ended_at = self.ended_at if self.ended_at is not None else time.monotonic()
        return (ended_at - self.first_token_at) / (self.completion_tokens - 1)

    @property
    def tpot_ms(self) -> float | None:
        """The same in milliseconds; None of a request that failed."""
        return None if self.status == "error" or self.tpot_s is None else 1000 * self.tpot_s

    @property
    def missed(self) -> str:
        """The part of its goal that was missed first: "error", "ttft" or "tpot"; "" if all were met."""
        if self.status == "error":
            return "error"
        if self.first_token_at is not None and self.first_token_at - self.received_at > self.ttft_goal_s:
            return "ttft"
        return "tpot" if (self.tpot_s or 0.0) > self.goal.tpot_s else ""

    @property
    def ttft_goal_s(self) -> float:
        """Seconds from receipt in which the first token is in time; infinite without a goal."""
        return self.goal.ttft_s(self.prompt_tokens)

    def began(self, attempt: AttemptLine) -> None:
        """Record another placed attempt. Unclaimed ones, ten a second without workers, are dropped first."""
        self.attempts.append(attempt)
        if len(self.attempts) > MAX_ATTEMPTS:
            unbegun = next((line for line in self.attempts[1:-1] if line.claimed_at is None), None)
            if unbegun is not None:
                self.attempts.remove(unbegun)
                self.dropped_attempts += 1

    def claimed(self, worker: str, now: float) -> None:
        if (attempt := self.attempt) is not None and attempt.claimed_at is None:
            attempt.claimed_at, attempt.claimed_by = now, worker

    def settled(self, message: Settle) -> None:
        """The prefill worker's report of its handoff."""
        if (attempt := self._numbered(message.attempt)) is not None:
            attempt.settled = message

    def imported(self, message: Imported, now: float) -> None:
        """The decode worker's report of the handoff."""
        if (attempt := self._numbered(message.attempt)) is not None:
            attempt.imported, attempt.imported_at = message, now

    def took(self, tokens: Tokens, num_tokens: int, finish: Finish, now: float) -> None:
        """Record that `num_tokens` new tokens are on their way to the client."""
        self.finish = finish
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.num_tokens += num_tokens
            if attempt.first_token_at is None:
                attempt.first_token_at = now
                attempt.worker_queue_ms, attempt.prefill_ms = tokens.queue_ms, tokens.prefill_ms
                attempt.waits_ms = {reason: ms for reason, ms in tokens.waits.items() if reason in WORKER_WAITS}
                attempt.cached_tokens = tokens.cached_tokens if tokens.cached_tokens >= 0 else None
        if self.first_token_at is None:
            self.first_token_at = now
            self.cached_tokens = max(0, tokens.cached_tokens)
        self.completion_tokens += num_tokens
        self.frames.take(tokens, (now - self.received_at) * 1000, num_tokens)

    def went_on(self, now: float) -> None:
        """Record one token that is neither the first nor the last of an attempt."""
        self.attempts[-1].num_tokens += 1
        self.completion_tokens += 1
        self.frames.add((now - self.received_at) * 1000, 1)

    def shown(self, now: float, *, sent: bool = False) -> None:
        """Record that the first token became text, or, if `sent`, goes to the client. Only the first of each counts."""
        if self.first_token_at is None or self.first_sent_at is not None or ("http" in self.phases and not sent):
            return
        self.phases["http"] = 1000 * (self.submitted_at - self.received_at + now - self.first_token_at)
        if sent:
            self.first_sent_at = now

    def _numbered(self, attempt: int) -> AttemptLine | None:
        return next((line for line in self.attempts if line.number == attempt), None)

    def gave_up(self, reason: str, now: float) -> None:
        """Record the end of the newest attempt; the request continues."""
        if (attempt := self.attempt) is not None and attempt.ended_at is None:
            attempt.ended_at, attempt.outcome = now, reason

    def ended(self, status: str, detail: str, now: float) -> None:
        self.status, self.detail, self.ended_at = status, detail, now
        self.gave_up("ok" if status in (Finish.STOP, Finish.LENGTH) else detail or status, now)

    # -- JSON ------------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """One line of `/debug/requests`."""
        attempt = self.attempt
        return {
            "request_id": self.request_id,
            "trace_id": self.traceparent[3:35],
            "tenant": self.tenant,
            "key": self.asker.key,
            "model": self.model,
            "received_unix": round(self.received_unix, 3),
            "received_at": round(self.received_at, 6),
            "first_sent_at": None if self.first_sent_at is None else round(self.first_sent_at, 6),
            "status": self.status,
            "detail": self.detail,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_ms": rounded(self.ttft_ms),
            "total_ms": self._ms(self.ended_at if self.ended_at is not None else time.monotonic()),
            "num_attempts": self.num_attempts,
            "prefill_worker": attempt.claimed_by or attempt.prefill if attempt else "",
            "decode_worker": attempt.decoder if attempt else "",
            "placement": attempt.reason if attempt else "",
            "goal_ms": {"ttft": finite_ms(self.ttft_goal_s), "tpot": finite_ms(self.goal.tpot_s)},
            "missed": self.missed,
            "phases_ms": {name: rounded(value) for name, value in self.phases.items()},
        }

    def as_json(self) -> dict[str, Any]:
        """All of `/debug/requests/{id}`."""
        return self.summary() | {
            "submitted_ms": self._ms(self.submitted_at),
            "waited_ms": self._waited_ms(),
            "ahead": self.ahead,
            "attempts": [attempt.as_json(self.received_at) for attempt in self.attempts],
            **self.frames.as_json(),
        }

    def _waited_ms(self) -> float | None:
        """The wait for admission so far."""
        waits = self.status == "waiting"
        return rounded((time.monotonic() - self.submitted_at) * 1000 if waits else self.waited_ms)

    def _ms(self, at: float | None) -> float | None:
        return ms_since(self.received_at, at)


class Timelines:
    """Waiting, running and recent requests, and the slowest TTFTs of the last 15 minutes."""

    def __init__(self) -> None:
        self._on_end: list[Callable[[Timeline], None]] = []
        self._waiting: dict[str, Timeline] = {}
        self._running: dict[str, Timeline] = {}
        self._recent: OrderedDict[str, Timeline] = OrderedDict()
        self._slowest: list[tuple[float, int, Timeline]] = []  # a heap, least slow first
        self._count = 0

    def on_end(self, callback: Callable[[Timeline], None]) -> None:
        self._on_end.append(callback)

    @contextlib.contextmanager
    def waiting(self, timelines: Iterable[Timeline]) -> Iterator[None]:
        """Context manager: the request counts as waiting until `start`. Refused ones leave no trace: refusals are counted."""
        names = []
        for timeline in timelines:
            names.append(timeline.request_id)
            timeline.status = "waiting"
            self._waiting[timeline.request_id] = timeline
        try:
            yield
        finally:
            for name in names:
                self._waiting.pop(name, None)

    def start(self, timeline: Timeline) -> None:
        self._waiting.pop(timeline.request_id, None)
        timeline.status = "running"
        self._running[timeline.request_id] = timeline

    def end(self, timeline: Timeline, *, error: BaseException | None = None, cancelled: str = "") -> None:
        """Record the request's end. Only the first end counts."""
        if timeline.ended_at is not None:
            return
        now = time.monotonic()
        if error is not None:
            timeline.ended("error", _describe(error), now)
        elif cancelled and cancelled != STOP_STRING:
            timeline.ended("cancelled", cancelled, now)
        else:
            timeline.ended(timeline.finish or "stop", "", now)
        self._running.pop(timeline.request_id, None)
        self._recent[timeline.request_id] = timeline
        if len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        for callback in self._on_end:
            callback(timeline)
        if timeline.ttft_ms is None:
            return
        self._forget_old(now)
        self._count += 1
        heapq.heappush(self._slowest, (timeline.ttft_ms, self._count, timeline))
        if len(self._slowest) > MAX_SLOWEST:
            heapq.heappop(self._slowest)

    def find(self, wanted: str) -> list[Timeline]:
        """The choice with this request id, or all choices of the answer with this id."""
        for timeline in self.all():
            if timeline.request_id == wanted:
                return [timeline]
        found = {t.request_id: t for t in self.all() if t.request_id.rpartition("-")[0] == wanted}
        return [found[name] for name in sorted(found, key=_choice_of)]

    def since(self, instant: float) -> list[Timeline]:
        """Running requests, and those that ended since `instant`, newest first."""
        ended = itertools.takewhile(lambda line: (line.ended_at or 0.0) >= instant, reversed(self._recent.values()))
        return [*reversed(self._running.values()), *ended]

    def as_json(self, limit: int) -> dict[str, Any]:
        """`/debug/requests`: `limit` summaries of each list; waiting ones by time waited."""
        self._forget_old(time.monotonic())
        slowest = [timeline for _, _, timeline in sorted(self._slowest, reverse=True)]
        return {
            "waiting": _summaries(self._waiting.values(), limit),
            "running": _summaries(reversed(self._running.values()), limit),
            "latest": _summaries(reversed(self._recent.values()), limit),
            "slowest": _summaries(slowest, limit),
        }

    def all(self) -> list[Timeline]:
        """All kept timelines, each once."""
        slowest = (timeline for _, _, timeline in self._slowest)
        lines = [*self._waiting.values(), *self._running.values(), *self._recent.values(), *slowest]
        return list({id(line): line for line in lines}.values())

    def _forget_old(self, now: float) -> None:
        young = [entry for entry in self._slowest if now - (entry[2].ended_at or now) < SLOWEST_FOR_S]
        if len(young) < len(self._slowest):
            heapq.heapify(young)
            self._slowest = young


def _summaries(timelines: Iterable[Timeline], limit: int) -> list[dict[str, Any]]:
    return [timeline.summary() for timeline, _ in zip(timelines, range(limit), strict=False)]


def _describe(error: BaseException) -> str:
    return f"{error.code}: {error.message}" if isinstance(error, ServingError) else type(error).__name__


def _choice_of(request_id: str) -> tuple[int, str]:
    index = request_id.rpartition("-")[2]
    return len(index), index
