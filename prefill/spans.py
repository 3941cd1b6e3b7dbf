"""The prefill worker's spans: the job's wait, its chunks, its reservation, the transfer of its blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.tracing import Attributes, Children, SpanEvent, Tracer, Value
from prefill.request import PrefillRequest

MAX_EVENTS = 64  # chunks or pushes recorded individually


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
        name: str, began_at: float, ended_at: float | None, attributes: Attributes, events: Sequence[SpanEvent] = ()
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
