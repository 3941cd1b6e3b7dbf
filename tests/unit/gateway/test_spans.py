"""A stream that gave its place to another tenant: its trace accounts for the wait, and calls nothing an error."""

from __future__ import annotations

from common.tracing import NoTracer, Span
from gateway.observe.attainment import ServiceLevels
from gateway.observe.spans import RequestSpans
from gateway.request.ends import End
from gateway.request.timeline import AttemptLine, Timeline


class Recorded(NoTracer):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def wants(self, context: str) -> bool:
        return True

    def record(self, span: Span) -> None:
        self.spans.append(span)


def attempt(number: int, began_at: float) -> AttemptLine:
    return AttemptLine(number=number, began_at=began_at, because="", prefill="p", decode=["d"], reason="load")


def test_the_wait_for_a_place_is_a_span_between_two_attempts() -> None:
    tracer = Recorded()
    line = Timeline(
        request_id="r-0", received_at=0.0, submitted_at=0.0, prompt_tokens=1,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )  # fmt: skip
    line.began(attempt(1, 1.0))
    line.gave_up(End.PREEMPTED.text, 2.0)
    line.began(attempt(2, 5.0))
    line.gave_up(End.WORKER_LOST.text, 6.0)
    line.began(attempt(3, 6.5))
    line.ended("stop", "", 7.0)
    RequestSpans(tracer, "gateway", ServiceLevels()).record(line)
    assert [(span.began_at, span.ended_at) for span in tracer.spans if span.name == "place"] == [(2.0, 5.0)]
    assert [span.error for span in tracer.spans if span.name == "attempt"] == ["", "worker lost", ""]
