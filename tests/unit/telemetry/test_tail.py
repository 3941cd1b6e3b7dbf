"""Which traces are sent is decided when their requests ended, alike in every process."""

from __future__ import annotations

import time
from collections.abc import Iterable

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor

from common.messages import Goal
from common.tracing import NoTracer, Span
from gateway.observe.spans import TOLD_FOR_S, RequestSpans
from gateway.request.attempt import AttemptLine
from gateway.request.timeline import Timeline
from telemetry.spans import Readable
from telemetry.tail import MAX_HELD_SPANS, TailSampling

GOAL = Goal(ttft_ms=1000.0, tpot_ms=50.0)
readable = Readable(Resource({}), SpanLimits())


class Sent(SpanProcessor):
    """Where spans go that are sent."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.names.append(span.name)


def context_of(number: int) -> str:
    return f"00-{number:032x}-b7ad6b7169203331-01"


def of_trace(number: int, name: str) -> ReadableSpan:
    return readable(Span(name=name, context=context_of(number), began_at=1.0, ended_at=2.0), 0)


def test_spans_are_held_until_their_trace_is_worth_sending_and_later_ones_are_sent() -> None:
    sent = Sent()
    tail = TailSampling(sent, rest_share=0.0)
    for number in (1, 2, 1):
        tail.on_end(of_trace(number, f"early {number}"))
    tail.keep([1, 3])
    tail.keep([1])  # named again by the next heartbeat
    assert sent.names == ["early 1", "early 1"]
    for number in (1, 2, 3):
        tail.on_end(of_trace(number, f"late {number}"))
    assert sent.names == ["early 1", "early 1", "late 1", "late 3"]
    assert tail.num_held == 2


def test_a_share_of_the_rest_is_sent_and_every_process_chooses_alike() -> None:
    one, other = Sent(), Sent()
    for sent in (one, other):
        tail = TailSampling(sent, rest_share=0.25)
        for number in range(1, 2000):
            tail.on_end(of_trace((number * 0x9E3779B9) % 2**32, str(number)))
    assert one.names == other.names
    assert 0.2 < len(one.names) / 2000 < 0.3


def test_what_is_held_is_bounded_and_the_oldest_traces_go_first() -> None:
    sent = Sent()
    tail = TailSampling(sent, rest_share=0.0)
    for number in range(1, MAX_HELD_SPANS + 11):
        tail.on_end(of_trace(number, str(number)))
    assert tail.num_held == MAX_HELD_SPANS
    tail.keep(range(1, MAX_HELD_SPANS + 11))
    assert (len(sent.names), sent.names[0]) == (MAX_HELD_SPANS, "11")
    assert tail.num_held == 0


def test_the_gateway_keeps_the_slow_the_failed_and_the_moved_and_tells_for_a_while() -> None:
    kept: list[str] = []

    class Keeps(NoTracer):
        def wants(self, context: str) -> bool:
            return True

        def keep(self, traces: Iterable[str]) -> None:
            kept.extend(traces)

    spans = RequestSpans(Keeps(), "gateway")
    for number, (ttft_s, status, attempts) in enumerate(
        [(0.5, "stop", 1), (1.5, "stop", 1), (0.5, "error", 1), (0.5, "stop", 2), (0.5, "cancelled", 1)]
    ):
        line = Timeline(
            request_id="r-0",
            received_at=0.0,
            submitted_at=0.0,
            prompt_tokens=1,
            traceparent=context_of(number),
            goal=GOAL,
        )
        for attempt in range(attempts):
            line.began(AttemptLine(number=attempt + 1, began_at=0.0, because="", prefill="p", decode=["d"], reason="x"))
        line.first_token_at = ttft_s
        line.ended(status, "", ttft_s)
        spans.record(line)
    assert kept == [f"{number:032x}" for number in (1, 2, 3)]
    now = time.monotonic()
    assert spans.kept(now) == bytes.fromhex("".join(kept))  # a worker reads this as the list again
    assert spans.kept(now + TOLD_FOR_S + 1) == b""
