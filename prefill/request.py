"""One request inside the prefill role, and its spans: the job's wait, its chunks, its reservation, its blocks' transfer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.messages import AttemptMessage, Job, Tokens
from common.tracing import Attributes, Children, SpanEvent, Tracer, Value
from common.words import Finish
from engine.sequence import Sequence
from prefill.stop import Stop
from worker.context import Admission
from worker.serving.jobs import ClaimedJob
from worker.serving.turns import Wait, Waits

MAX_EVENTS = 64  # chunks or pushes recorded individually


_WHY: dict[Admission | None, Wait] = {
    Admission.NO_ROOM: Wait.ROOM,
    Admission.LOADING: Wait.LOAD,
    Admission.BUILDING: Wait.GRAMMAR,
}


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """A claimed job with its sequence. `changed` is set whenever its handoff may have to act."""

    claimed: ClaimedJob
    sequence: Sequence
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: bool = False  # holds blocks
    admission: Admission | None = None  # outcome of the last attempt
    waits: Waits = field(default_factory=Waits)  # until its first chunk
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

    @property
    def is_computing(self) -> bool:
        """True while passes compute its prompt."""
        return self.admitted and self.first_token is None and self.stopped is None

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


def note_waits(requests: Iterable[PrefillRequest], now: float) -> None:
    """Note why prompts that no pass has begun go on to wait. Those of the next pass count as begun after it."""
    for request in requests:
        if not request.started_at and request.stopped is None:
            reason = _WHY.get(request.admission, Wait.PROMPTS)
            request.waits.note(reason, since=request.claimed.claimed_at, now=now)


@dataclass(frozen=True, slots=True)
class Push:
    """A run of blocks written to the decode worker."""

    began_at: float
    ended_at: float
    num_blocks: int


@dataclass(slots=True, kw_only=True, eq=False)
class HandoffRecord:
    """Timestamps of one handoff."""

    asked_at: float | None = None  # when the first candidate was asked
    refusals: int = 0
    granted_at: float | None = None
    accepted_at: float | None = None
    decode_worker: str = ""
    link: str = ""  # transport
    link_bytes_per_s: float = 0.0
    pushes: list[Push] = field(default_factory=list)
    context: str = ""  # the transfer's span, parent of the decode worker's verification

    @property
    def push_ms(self) -> float:
        """Total time of all pushes in milliseconds."""
        return 1000 * sum(push.ended_at - push.began_at for push in self.pushes)

    def late_push_ms(self, known_at: float) -> float:
        """Time of pushes after the first token was sampled, in milliseconds."""
        return 1000 * sum(max(0.0, push.ended_at - max(push.began_at, known_at)) for push in self.pushes)


def record_prefill(
    tracer: Tracer, request: PrefillRequest, handoff: HandoffRecord, *, worker: str, block_bytes: int
) -> None:
    """Record the spans of a request that left this worker, however it ended."""
    parent = request.job.traceparent
    if not tracer.wants(parent):
        return
    now = time.monotonic()
    children = Children(
        tracer,
        parent,
        {"baton.request_id": request.id, "baton.attempt": request.job.attempt, "baton.worker": worker},
    )

    def record(
        name: str,
        began_at: float,
        ended_at: float | None,
        attributes: Attributes,
        events: list[SpanEvent] | tuple[()] = (),
    ) -> None:
        children.record(
            name,
            began_at,
            now if ended_at is None else ended_at,
            attributes,
            context=handoff.context if name == "transfer" else "",
            events=events[:MAX_EVENTS],
            outcome=request.why_stopped if ended_at is None else "",
        )

    record("wait", request.claimed.claimed_at, request.started_at or None, {})
    if request.started_at:
        chunks = [SpanEvent(name="chunk", at=at, attributes={"baton.tokens": count}) for at, count in request.chunks]
        prefill: dict[str, Value] = {
            "baton.prompt_tokens": request.job.num_prompt_tokens,
            "baton.cached_tokens": request.sequence.num_cached,
            "baton.computed_tokens": sum(count for _, count in request.chunks),
            "baton.prefill.chunks": len(request.chunks),
        }
        record("prefill", request.started_at, request.first_token_at or None, prefill, chunks)
    if handoff.asked_at is not None:
        reserve: dict[str, Value] = {
            "baton.decode.worker": handoff.decode_worker,
            "baton.reserve.refusals": handoff.refusals,
        }
        record("reserve", handoff.asked_at, handoff.granted_at, reserve)
    if handoff.granted_at is not None and not request.finish:
        blocks = sum(push.num_blocks for push in handoff.pushes)
        transfer: dict[str, Value] = {
            "baton.decode.worker": handoff.decode_worker,
            "baton.transfer.blocks": blocks,
            "baton.transfer.bytes": blocks * block_bytes,
            "baton.transfer.link": handoff.link,
            "baton.transfer.link_bytes_per_s": handoff.link_bytes_per_s,
            "baton.transfer.push_ms": handoff.push_ms,
            "baton.transfer.late_push_ms": handoff.late_push_ms(request.first_token_at or now),
        }
        pushes = [_push_event(push) for push in handoff.pushes]
        record("transfer", handoff.granted_at, handoff.accepted_at, transfer, pushes)


def _push_event(push: Push) -> SpanEvent:
    took_ms = 1000 * (push.ended_at - push.began_at)
    return SpanEvent(
        name="push",
        at=push.ended_at,
        attributes={"baton.transfer.blocks": push.num_blocks, "baton.transfer.push_ms": took_ms},
    )
