"""The decode worker's part of a trace: the verification of what came over, and the sequence's time in the batch."""

from __future__ import annotations

import time

from common.messages import Handoff
from common.tracing import Span, Tracer, Value, child_of
from decode.request import DecodeRequest


def record_verification(tracer: Tracer, message: Handoff, *, worker: str, began_at: float, refusal: str) -> None:
    """Record that a manifest was checked; `refusal`: why it was not accepted, or ""."""
    if tracer.wants(message.traceparent):
        span = Span(
            name="verify",
            context=child_of(message.traceparent),
            parent=message.traceparent,
            began_at=began_at,
            ended_at=time.monotonic(),
            attributes={
                "baton.request_id": message.request_id,
                "baton.attempt": message.attempt,
                "baton.worker": worker,
                "baton.transfer.blocks": len(message.digests) // 8,
            },
            error=refusal,
        )
        tracer.record(span)


def record_decode(tracer: Tracer, request: DecodeRequest, *, worker: str) -> None:
    """Record a sequence that left the batch: its last token came, or it was stopped. A local one was also prefilled here."""
    parent = request.job.traceparent
    if not tracer.wants(parent):
        return
    now = time.monotonic()
    common: dict[str, Value] = {
        "baton.request_id": request.id,
        "baton.attempt": request.attempt,
        "baton.worker": worker,
    }
    # The gateway stops what nobody needs any more; only what broke is an error.
    error = request.stopped if request.stopped not in ("", "cancelled") else ""
    began_at = request.began_at
    if not request.job.decode_workers:
        prefill = Span(
            name="prefill",
            context=child_of(parent),
            parent=parent,
            began_at=began_at,
            ended_at=request.first_token_at or now,
            attributes={
                **common,
                "baton.prompt_tokens": request.job.num_prompt_tokens,
                "baton.cached_tokens": request.sequence.num_cached,
                "baton.local": True,
            },
            error="" if request.first_token_at else error,
        )
        tracer.record(prefill)
        began_at = request.first_token_at
    if began_at:
        decode = Span(
            name="decode",
            context=child_of(parent),
            parent=parent,
            began_at=began_at,
            ended_at=request.ended_at or now,
            attributes={
                **common,
                "baton.tokens": request.sequence.num_generated - request.num_before,
                "baton.preemptions": request.preemptions,
                "baton.finish": request.finish or request.stopped,
                "baton.decode.first_step_ms": 1000 * max(0.0, (request.first_token_at or now) - request.began_at),
            },
            error=error,
        )
        tracer.record(decode)
