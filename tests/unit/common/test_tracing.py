"""Contexts of spans, and what becomes of spans that nobody takes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from common.config import ConfigError, GatewaySettings, load_settings
from common.servers import free_port
from common.tracing import Children, NoTracer, Span, SpanEvent, child_of, valid
from gateway.attainment import ServiceLevels
from gateway.spans import TOLD_FOR_S, RequestSpans, new_trace
from gateway.timeline import AttemptLine, Timeline
from services.otlp.tail import MAX_HELD, TailTracer
from services.otlp.tracer import MAX_QUEUED, OtlpTracer, is_sampled
from services.tracing import open_tracer
from tests.e2e.otlp_sink import otlp_sink

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROOT = Path(__file__).resolve().parents[3]


def span(name: str = "x", **fields: object) -> Span:
    return Span(name=name, context=CONTEXT, began_at=1.0, ended_at=2.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "is_one"),
    [
        (CONTEXT, True),
        (CONTEXT.replace("00-", "cc-", 1), True),  # a later version
        (CONTEXT.replace("00-", "ff-", 1), False),
        (CONTEXT[:-1], False),
        (CONTEXT.upper(), False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01", False),
        (CONTEXT + "\n", False),
        ("", False),
    ],
)
def test_only_a_w3c_header_is_gone_on_with(header: str, is_one: bool) -> None:
    assert valid(header) == (header if is_one else "")


def test_a_child_is_another_span_of_the_same_trace_with_the_same_decision() -> None:
    for context in (CONTEXT, CONTEXT[:-1] + "0", new_trace(1.0), new_trace(0.0)):
        child = child_of(context)
        assert valid(child)
        assert (child[:36], child[52:]) == (context[:36], context[52:])
        assert child[36:52] != context[36:52]
        assert is_sampled(child) == is_sampled(context)


def test_the_share_of_new_traces_is_the_one_asked_for() -> None:
    assert all(is_sampled(new_trace(1.0)) for _ in range(100))
    assert not any(is_sampled(new_trace(0.0)) for _ in range(100))
    assert 0.4 < sum(is_sampled(new_trace(0.5)) for _ in range(2000)) / 2000 < 0.6  # 9 standard deviations
    for foreign in ("", "made up", CONTEXT + "-01", CONTEXT[:-2] + "0x"):  # from a process that is not to be trusted
        assert not is_sampled(foreign)


def test_what_broke_is_an_error_and_what_nobody_needs_any_more_is_none() -> None:
    took: list[Span] = []

    class Keeps(NoTracer):
        def record(self, span: Span) -> None:
            took.append(span)

    children = Children(Keeps(), CONTEXT, {"baton.attempt": 2})
    for outcome in ("", "ok", "cancelled", "worker lost"):
        children.record("decode", 1.0, 2.0, {"baton.tokens": 3}, outcome=outcome)
    children.record("transfer", 1.0, 2.0, {}, context=child_of(CONTEXT), links=[CONTEXT])
    assert [one.error for one in took] == ["", "", "", "worker lost", ""]
    assert {one.parent for one in took} == {CONTEXT}
    assert len({one.context for one in took}) == 5
    assert took[0].attributes == {"baton.attempt": 2, "baton.tokens": 3}


def test_traces_need_no_package_of_opentelemetry_s() -> None:
    code = """
import sys
for name in ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "google"):
    sys.modules[name] = None  # as if it were not installed
import services.gateway.__main__, services.worker_process
from services.tracing import open_tracer
open_tracer("http://127.0.0.1:9", service="s", instance="i").close()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


class Sent(NoTracer):
    """Where spans go that are sent."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def wants(self, context: str) -> bool:
        return is_sampled(context)

    def record(self, span: Span) -> None:
        self.names.append(span.name)


def of_trace(number: int, name: str) -> Span:
    return Span(name=name, context=f"00-{number:032x}-b7ad6b7169203331-01", began_at=1.0, ended_at=2.0)


def test_spans_are_held_until_their_trace_is_worth_sending_and_those_that_come_later_are_sent() -> None:
    sent = Sent()
    tracer = TailTracer(sent, rest_share=0.0)
    assert tracer.wants(CONTEXT)
    for number in (1, 2, 1):
        tracer.record(of_trace(number, f"early {number}"))
    tracer.keep([f"{1:032x}", f"{3:032x}"])
    tracer.keep([f"{1:032x}"])  # told again
    assert sent.names == ["early 1", "early 1"]
    for number in (1, 2, 3):
        tracer.record(of_trace(number, f"late {number}"))
    assert sent.names == ["early 1", "early 1", "late 1", "late 3"]
    assert tracer.held == 2


def test_of_the_rest_a_share_is_sent_and_every_process_chooses_alike() -> None:
    one, other = Sent(), Sent()
    for sent in (one, other):
        tracer = TailTracer(sent, rest_share=0.25)
        for number in range(2000):
            tracer.record(of_trace((number * 0x9E3779B9) % 2**32, str(number)))
    assert one.names == other.names
    assert 0.2 < len(one.names) / 2000 < 0.3


def test_what_is_held_is_bounded_and_the_oldest_traces_go_first() -> None:
    sent = Sent()
    tracer = TailTracer(sent, rest_share=0.0)
    for number in range(MAX_HELD + 10):
        tracer.record(of_trace(number, str(number)))
    assert tracer.held == MAX_HELD
    tracer.keep(f"{number:032x}" for number in range(MAX_HELD + 10))
    assert (len(sent.names), sent.names[0]) == (MAX_HELD, "10")
    assert tracer.held == 0


def test_the_gateway_keeps_the_slow_the_failed_and_the_moved_and_tells_for_a_while() -> None:
    kept: list[str] = []

    class Keeps(Sent):
        def keep(self, traces: Iterable[str]) -> None:
            kept.extend(traces)

    spans = RequestSpans(Keeps(), "gateway", ServiceLevels(ttft_s=1.0, tpot_s=0.05))
    for number, (ttft_s, status, attempts) in enumerate(
        [(0.5, "stop", 1), (1.5, "stop", 1), (0.5, "error", 1), (0.5, "stop", 2), (0.5, "cancelled", 1)]
    ):
        line = Timeline(
            request_id="r-0", received_at=0.0, submitted_at=0.0, prompt_tokens=1, traceparent=of_trace(number, "").context
        )  # fmt: skip
        for attempt in range(attempts):
            line.began(AttemptLine(number=attempt + 1, began_at=0.0, because="", prefill="p", decode=["d"], reason="x"))
        line.first_token_at = ttft_s
        line.ended(status, "", ttft_s)
        spans.record(line)
    assert kept == [f"{number:032x}" for number in (1, 2, 3)]
    now = time.monotonic()
    assert spans.kept(now) == bytes.fromhex("".join(kept))  # in a worker's hands this is the list again
    assert spans.kept(now + TOLD_FOR_S + 1) == b""


async def test_every_kind_of_value_arrives_as_it_was() -> None:
    values = {
        "text": "größer ✓", "empty": "", "no text \ud800": "\ud800", "yes": True, "no": False, "one": 1, "none": 0, "less": -5,
        "large": 2**62, "real": 0.1, "minus": -2.5, "names": ["decode-0", "decode-1"], "nobody": [], "long": "x" * 100_000,
    }  # fmt: skip
    whole = span(
        "all of it",
        parent=child_of(CONTEXT),
        attributes=values,
        events=[SpanEvent(name="push", at=1.5, attributes=values), SpanEvent(name="bare", at=1.6)],
        links=[child_of(CONTEXT), child_of(CONTEXT)],
        error="it broke",
        kind="server",
    )
    async with otlp_sink() as sink:
        tracer = open_tracer(sink.url, service="test", instance="me")
        tracer.record(whole)
        tracer.record(whole)  # now most of it is known already
        tracer.close()
        first, second = await sink.until(lambda spans: len(spans) == 2)
    wanted = {name.replace("\ud800", "?"): value for name, value in values.items()} | {"no text ?": "?"}
    for one in (first, second):
        assert one.attributes == wanted
        assert [type(value) for value in one.attributes.values()] == [type(value) for value in wanted.values()]
        assert one.events == [("push", wanted), ("bare", {})]
        assert one.links == [link[36:52] for link in whole.links]
        assert (one.name, one.parent, one.error, one.kind) == ("all of it", whole.parent[36:52], "it broke", 2)


async def test_what_a_collector_could_not_take_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.otlp.tracer.SEND_EVERY_S", 0.05)
    async with otlp_sink() as sink:
        sink.refusing = 503
        tracer = OtlpTracer(sink.url, service="test", instance="me")
        tracer.record(span("early"))
        await sink.until_refused()
        tracer.record(span("late"))
        sink.refusing = 0
        spans = await sink.until(lambda spans: len(spans) == 2)
        assert [one.name for one in spans] == ["early", "late"]
        sink.refusing = 400  # it will never take this
        tracer.record(span("wrong"))
        await sink.until_refused()
        sink.refusing = 0
        tracer.record(span("right"))
        spans = await sink.until(lambda spans: len(spans) == 3)
        await asyncio.to_thread(tracer.close)
    assert (spans[2].name, tracer.dropped) == ("right", 1)


async def test_opentelemetry_s_variables_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=general")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "X-Key=a%20secret, x-team = blue")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=ours%2Ctoo")
    async with otlp_sink() as sink:
        tracer = open_tracer(sink.url + "/v1/traces", service="test", instance="me")
        tracer.record(span("zipped"))
        tracer.close()
        (one,) = await sink.until(lambda spans: len(spans) == 1)
    assert (one.name, one.service) == ("zipped", "baton-test")  # the name is ours to give
    assert sink.headers["content-encoding"] == "gzip"
    assert (sink.headers["x-key"], sink.headers["x-team"]) == ("a secret", "blue")


async def test_what_was_recorded_before_the_close_arrives() -> None:
    async with otlp_sink() as sink:
        tracer = open_tracer(sink.url + "/", service="test", instance="me")
        for number in range(300):
            tracer.record(span(f"s{number}", error="broken" if number == 7 else "", attributes={"n": number}))
        tracer.close()
        spans = await sink.until(lambda spans: len(spans) == 300)
    assert {(one.service, one.instance, one.trace) for one in spans} == {("baton-test", "me", CONTEXT[3:35])}
    assert {one.name: one.error for one in spans if one.error} == {"s7": "broken"}
    assert all(one.ended - one.began == pytest.approx(1.0, abs=1e-3) for one in spans)
    assert sorted(one.attributes["n"] for one in spans) == list(range(300))


def test_without_a_collector_spans_are_dropped_and_counted_never_kept_without_bound() -> None:
    tracer = OtlpTracer(f"http://127.0.0.1:{free_port()}", service="test", instance="me")
    for number in range(MAX_QUEUED + 100):
        tracer.record(span(f"s{number}"))
    tracer.close()
    assert tracer.dropped >= 100


def test_an_endpoint_that_is_none_stops_the_start() -> None:
    for wrong in ("localhost:4318", "grpc://x:4317", "http://"):
        with pytest.raises(ConfigError, match="otlp-endpoint"):
            load_settings(GatewaySettings, command="gateway", arguments=["--otlp-endpoint", wrong], environment={})
