"""The gateway's part of a trace: the HTTP request as a server span, and each attempt with its placement and queue time.

    POST /v1/chat/completions                          here, from the client's `traceparent`
    ├─ admission                                       here
    ├─ place (a stream's wait after it gave its place to another tenant)      here
    └─ attempt (one each; a retry links to the one before)
       ├─ placement, queue                             here
       ├─ wait, prefill, reserve, transfer             the prefill worker (`prefill/request.py`)
       │                          └─ verify            the decode worker (`decode/request.py`)
       └─ decode                                       the decode worker

Attribute names: HTTP's and GenAI's semantic conventions where they have one (docs/observability.md), else `baton.*`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter

import msgspec

from common.tracing import Attributes, Children, Span, SpanEvent, Tracer, Value, child_of, in_trace
from gateway.answers.answer import Answer
from gateway.http.exchange import RequestScope, RequestTrace, Way
from gateway.request.attempt import AttemptLine
from gateway.request.ends import End
from gateway.request.timeline import Timeline

TOLD_FOR_S = 3.5  # a trace is named in three heartbeats
MAX_KEPT = 1024  # traces in one heartbeat: 16 kB


class ServerSpans:
    """Spans around requests. They continue the client's trace even if its sampled flag is off."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def around(self, state: RequestScope, headers: Mapping[str, str], way: Way) -> Iterator[None]:
        """Record a request, if its trace is sampled."""
        parent = self._tracer.parent_of(headers)
        context = child_of(parent) if parent else self._tracer.new_trace()
        if not self._tracer.wants(context):
            state.trace = RequestTrace(context=parent)
            with in_trace(parent):
                yield
            return
        trace = state.trace = RequestTrace(context, parent, time.monotonic(), is_recorded=True)
        try:
            with in_trace(context):
                yield
        except BaseException as error:
            trace.error = trace.error or type(error).__name__
            raise
        finally:
            trace.status = state.status
            span = _server_span(trace, way)
            if span.error:
                self._tracer.keep([trace.context[3:35]])
            self._tracer.record(span)


def _server_span(trace: RequestTrace, way: Way) -> Span:
    attributes = trace.attributes
    attributes |= {
        **way.attributes,
        way.status: trace.status,
        "gen_ai.operation.name": way.operation,
        "gen_ai.provider.name": "baton",
    }
    if trace.answered is not None:
        attributes |= trace.answered()
    failed = trace.error or (str(trace.status) if trace.status >= 500 else "")
    if failed:
        attributes["error.type"] = failed
    return Span(
        name=way.name,
        context=trace.context,
        parent=trace.parent,
        began_at=trace.began_at,
        ended_at=time.monotonic(),
        attributes=attributes,
        kind="server",
        error=failed,
    )


def line_span(trace: RequestTrace, *, url: str, operation: str, batch: str, custom_id: str) -> Span:
    """The span around a batch line: a request without HTTP."""
    told: Attributes = {"baton.batch.id": batch, "baton.batch.custom_id": custom_id}
    way = Way(name=f"batch line {url}", operation=operation, attributes=told, status="baton.batch.status")
    return msgspec.structs.replace(_server_span(trace, way), kind="consumer")


def background_span(trace: RequestTrace, *, url: str, operation: str, response: str) -> Span:
    """The span around a background response."""
    told: Attributes = {"baton.response.id": response}
    way = Way(name=f"background {url}", operation=operation, attributes=told, status="baton.response.status")
    return msgspec.structs.replace(_server_span(trace, way), kind="consumer")


def describe_answer(answer: Answer) -> Attributes:
    """Attributes of an ended answer for its request's span."""
    usage = answer.usage()
    drafts: dict[str, Value] = {"baton.drafted_tokens": usage.drafted, "baton.accepted_tokens": usage.accepted}
    return (
        (drafts if usage.drafted else {})
        | _waits([choice.generation.timeline for choice in answer.choices])
        | {
            "gen_ai.response.id": answer.id,
            "gen_ai.response.model": answer.own_model,
            "gen_ai.response.finish_reasons": [choice.finish or "abort" for choice in answer.choices],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    )


def _waits(timelines: list[Timeline]) -> dict[str, Value]:
    """The waiting times; of several choices, those of the one with the first token."""
    attempts = [attempt for timeline in timelines for attempt in timeline.attempts]
    found: dict[str, Value] = {
        "baton.prefill.workers": sorted({one.claimed_by for one in attempts} - {""}),
        "baton.decode.workers": sorted(
            {one.decoder or ("" if one.decode else one.claimed_by) for one in attempts} - {""}
        ),
    }
    begun = [(ttft_ms, timeline) for timeline in timelines if (ttft_ms := timeline.ttft_ms) is not None]
    if begun:
        ttft_ms, first = min(begun, key=itemgetter(0))
        found["gen_ai.server.time_to_first_token"] = ttft_ms / 1000
        found["baton.queue_ms"] = first.phases.get("queue", first.waited_ms)
    return found


def worth_keeping(timeline: Timeline) -> bool:
    """True if tail sampling keeps it: the request was slow, failed or moved."""
    return bool(timeline.missed) or len(timeline.attempts) > 1


def _gave_way(attempt: AttemptLine) -> bool:
    return attempt.outcome == End.PREEMPTED.text


def _failed(attempt: AttemptLine) -> bool:
    return attempt.outcome not in (End.PREEMPTED.text, End.REASONING_ENDED.text)


class RequestSpans:
    """Records a timeline's spans at the request's end."""

    def __init__(self, tracer: Tracer, gateway_id: str) -> None:
        self._tracer = tracer
        self._gateway_id = gateway_id
        self._kept: deque[tuple[float, str]] = deque(maxlen=MAX_KEPT)  # end time and trace of each request

    def kept(self, now: float) -> bytes:
        """Traces to keep, for the heartbeat. Repeated, as workers may miss one."""
        while self._kept and now - self._kept[0][0] > TOLD_FOR_S:
            self._kept.popleft()
        return bytes.fromhex("".join(trace for _, trace in self._kept))

    def context_for(self, traceparent: str) -> str:
        """The context of an attempt's span, the parent of the workers' spans."""
        return child_of(traceparent) if self._tracer.wants(traceparent) else traceparent

    def record(self, timeline: Timeline) -> None:
        if not self._tracer.wants(timeline.traceparent):
            return
        if worth_keeping(timeline):
            trace = timeline.traceparent[3:35]
            self._tracer.keep([trace])
            self._kept.append((time.monotonic(), trace))
        ended_at = timeline.attempts[0].began_at if timeline.attempts else timeline.ended_at
        children = Children(self._tracer, timeline.traceparent, {"baton.request_id": timeline.request_id})
        admission: dict[str, Value] = {
            "baton.gateway": self._gateway_id,
            "baton.tenant": timeline.tenant,
            "baton.admission.waited_ms": timeline.waited_ms,
            "baton.admission.ahead": timeline.ahead,
            "baton.slo.missed": timeline.missed,  # collectors keep such traces
            "baton.prompt_tokens": timeline.prompt_tokens,
        }
        outcome = "" if timeline.attempts or timeline.status == "cancelled" else timeline.detail
        children.record(
            "admission", timeline.submitted_at, ended_at or timeline.submitted_at, admission, outcome=outcome
        )
        before: AttemptLine | None = None
        for attempt in timeline.attempts:
            if before is not None and _gave_way(before):
                children.record("place", before.ended_at or attempt.began_at, attempt.began_at, {})
            self._record_attempt(children, timeline, attempt, before.traceparent if before is not None else "")
            before = attempt

    def _record_attempt(self, children: Children, timeline: Timeline, attempt: AttemptLine, before: str) -> None:
        ended_at = attempt.ended_at or attempt.began_at
        first = [SpanEvent(name="first token", at=attempt.first_token_at)] if attempt.first_token_at is not None else []
        whole: dict[str, Value] = {
            "baton.attempt": attempt.number,
            "baton.retry.reason": attempt.because,
            "baton.prefill.worker": attempt.claimed_by,
            "baton.decode.worker": attempt.decoder,
            "baton.outcome": attempt.outcome,
            "baton.tokens": attempt.num_tokens,
        }
        children.record(
            "attempt",
            attempt.began_at,
            ended_at,
            whole,
            context=attempt.traceparent,
            events=first,
            links=[before] if before else [],
            outcome=attempt.outcome if timeline.status != "cancelled" and _failed(attempt) else "",
        )
        placed = SpanEvent(
            name="placement",
            at=attempt.published_at or attempt.began_at,
            attributes={
                "baton.placement.reason": attempt.reason,
                **{f"baton.placement.{name}": value for name, value in attempt.costs.items()},
                "baton.placement.prefill": attempt.prefill,
                "baton.placement.decode": attempt.decode,
            },
        )
        parts = Children(
            self._tracer,
            attempt.traceparent,
            {"baton.request_id": timeline.request_id, "baton.attempt": attempt.number},
        )
        parts.record("placement", attempt.began_at, attempt.published_at or ended_at, {}, events=[placed])
        if attempt.published_at is not None:
            claimed = attempt.claimed_at is not None
            parts.record(
                "queue",
                attempt.published_at,
                attempt.claimed_at or ended_at,
                {"baton.worker": attempt.claimed_by or attempt.prefill},
                outcome="" if claimed or timeline.status == "cancelled" else "not claimed",
            )
