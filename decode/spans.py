"""The decode worker's spans: the verification of a handoff, and the sequence's time in the batch."""

from __future__ import annotations

import time

from common.messages import Handoff
from common.tracing import Children, Tracer, Value
from decode.request import DecodeRequest


def record_verification(tracer: Tracer, message: Handoff, *, worker: str, began_at: float, refusal: str) -> None:
    """Record a manifest's check; `refusal`: the reason for refusing it, or ""."""
    parent = message.traceparent or ""
    if not tracer.wants(parent):
        return
    attributes: dict[str, Value] = {
        "baton.request_id": message.request_id,
        "baton.attempt": message.attempt,
        "baton.worker": worker,
        "baton.transfer.blocks": len(message.digests) // 8,
    }
    children = Children(tracer, parent, attributes)
    children.record("verify", began_at, time.monotonic(), {}, outcome=refusal)


def record_decode(tracer: Tracer, request: DecodeRequest, *, worker: str) -> None:
    """Record a sequence that left the batch, ended or stopped. A local one was also prefilled here."""
    parent = request.job.traceparent
    if not tracer.wants(parent):
        return
    now, began_at = time.monotonic(), request.began_at
    children = Children(
        tracer,
        parent,
        {"baton.request_id": request.id, "baton.attempt": request.attempt, "baton.worker": worker},
    )
    if not request.job.decode_workers:
        prefill: dict[str, Value] = {
            "baton.prompt_tokens": request.job.num_prompt_tokens,
            "baton.cached_tokens": request.sequence.num_cached,
            "baton.local": True,
        }
        outcome = "" if request.first_token_at else request.stopped
        children.record("prefill", began_at, request.first_token_at or now, prefill, outcome=outcome)
        began_at = request.first_token_at
    if began_at:
        decode: dict[str, Value] = {
            "baton.tokens": request.sequence.num_generated - request.num_before,
            "baton.preemptions": request.preemptions,
            **_drafts(request),
            "baton.finish": request.finish or request.stopped,
            "baton.decode.first_step_ms": 1000 * max(0.0, (request.first_token_at or now) - request.began_at),
        }
        children.record("decode", began_at, request.ended_at or now, decode, outcome=request.stopped)


def _drafts(request: DecodeRequest) -> dict[str, Value]:
    """Tokens of the drafts that passes verified here; nothing without drafts."""
    if not request.drafted:
        return {}
    return {"baton.drafted_tokens": request.drafted, "baton.accepted_tokens": request.accepted}
