"""Spans reach a collector over the wire as they were; OpenTelemetry's own variables work."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from common.settings import ConfigError
from common.tracing import NoTracer, Span, SpanEvent, child_of
from services.gateway.settings import GatewaySettings
from services.runtime.loading import load_settings
from services.runtime.tracer import open_tracer
from telemetry.tracer import QUEUE_SPANS, OtelTracer, is_sampled
from tests.e2e.otlp_sink import otlp_sink
from tests.ports import own_port

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROOT = Path(__file__).resolve().parents[3]


def span(name: str = "x", **fields: object) -> Span:
    return Span(name=name, context=CONTEXT, began_at=1.0, ended_at=2.0, **fields)  # type: ignore[arg-type]


@pytest.fixture
def tracer() -> Iterator[OtelTracer]:
    tracer = OtelTracer(f"http://127.0.0.1:{own_port()}", service="test", instance="me")
    yield tracer
    tracer.close()


def test_new_traces_are_sampled_as_opentelemetrys_variables_say(
    tracer: OtelTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(is_sampled(tracer.new_trace()) for _ in range(100))
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    with closing(OtelTracer(f"http://127.0.0.1:{own_port()}", service="test", instance="me")) as half:
        assert 0.4 < sum(is_sampled(half.new_trace()) for _ in range(2000)) / 2000 < 0.6  # 9 standard deviations
    for foreign in ("", "made up", CONTEXT + "-01", CONTEXT[:-2] + "0x"):
        assert not tracer.wants(foreign)
    assert not is_sampled(NoTracer().new_trace())


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (CONTEXT, "01"),
        (CONTEXT[:-2] + "00", "00"),
        (CONTEXT.replace("00-", "cc-", 1), "01"),  # a later version
        (CONTEXT.replace("00-", "ff-", 1), ""),
        (CONTEXT[:-1], ""),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        ("made up", ""),
    ],
)
def test_a_callers_headers_are_read_by_w3c_rules(tracer: OtelTracer, header: str, flags: str) -> None:
    read = tracer.parent_of({"traceparent": header})
    assert read == (f"00-{CONTEXT[3:52]}-{flags}" if flags else "")
    assert bool(NoTracer().parent_of({"traceparent": header})) == bool(read)
    assert tracer.parent_of({}) == ""


@pytest.mark.long
def test_opentelemetry_is_imported_only_by_a_process_that_sends_traces() -> None:
    code = """
import sys
for name in ("opentelemetry.sdk", "opentelemetry.exporter", "google.protobuf"):
    sys.modules[name] = None  # as if it were not installed
import services.gateway.process, services.worker.process
from common.settings import ConfigError
from services.runtime.tracer import open_tracer
open_tracer("", service="s", instance="i", variables={}).close()
open_tracer("http://127.0.0.1:9", service="s", instance="i", variables={"OTEL_SDK_DISABLED": "true"}).close()
try:
    open_tracer("http://127.0.0.1:9", service="s", instance="i", variables={})
except ConfigError as error:
    assert "extra 'otel'" in str(error), error
else:
    raise SystemExit("a tracer without its package")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


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
        tracer = open_tracer(sink.url, service="test", instance="me", variables={})
        tracer.record(whole)
        tracer.record(whole)
        tracer.close()
        first, second = await sink.until(lambda spans: len(spans) == 2)
    wanted = {name.replace("\ud800", "?"): value for name, value in values.items()} | {"no text ?": "?"}
    for one in (first, second):
        assert one.attributes == wanted
        assert [type(value) for value in one.attributes.values()] == [type(value) for value in wanted.values()]
        assert one.events == [("push", wanted), ("bare", {})]
        assert one.links == [link[36:52] for link in whole.links]
        assert (one.name, one.parent, one.error, one.kind) == ("all of it", whole.parent[36:52], "it broke", 2)


async def test_what_a_collector_could_not_take_is_sent_again() -> None:
    async with otlp_sink() as sink:
        sink.refusing = 503
        tracer = OtelTracer(sink.url, service="test", instance="me")
        tracer.record(span("early"))
        await sink.until_refused()
        sink.refusing = 0
        tracer.record(span("late"))
        spans = await sink.until(lambda spans: len(spans) == 2)
        assert sorted(one.name for one in spans) == ["early", "late"]
        sink.refusing = 400  # it will never take this
        tracer.record(span("wrong"))
        await sink.until_refused()
        sink.refusing = 0
        tracer.record(span("right"))
        spans = await sink.until(lambda spans: len(spans) == 3)
        tracer.close()
    assert spans[2].name == "right"


async def test_opentelemetry_s_variables_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with otlp_sink() as sink:
        said = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-key=general",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "X-Key=a%20secret, x-team = blue",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            "OTEL_SERVICE_NAME": "ours",
            "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "2",
            "OTEL_TRACES_SAMPLER": "always_off",
        }
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        tracer = open_tracer("", service="test", instance="me")  # no endpoint of ours: the variable's
        tracer.record(span("zipped", attributes={"a": 1, "b": 2, "c": 3}))
        assert not tracer.wants(tracer.new_trace())
        tracer.close()
        (one,) = await sink.until(lambda spans: len(spans) == 1)
    assert (one.name, one.service, one.instance) == ("zipped", "ours", "me")
    assert len(one.attributes) == 2
    assert sink.headers["content-encoding"] == "gzip"
    assert (sink.headers["x-key"], sink.headers["x-team"]) == ("a secret", "blue")


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_opentelemetry_s_variables_turn_traces_off(off: dict[str, str]) -> None:
    assert isinstance(open_tracer("http://127.0.0.1:9", service="s", instance="i", variables=off), NoTracer)


async def test_what_was_recorded_before_the_close_arrives() -> None:
    async with otlp_sink() as sink:
        tracer = open_tracer(sink.url + "/", service="test", instance="me", variables={})
        for number in range(300):
            tracer.record(span(f"s{number}", error="broken" if number == 7 else "", attributes={"n": number}))
        tracer.close()
        spans = await sink.until(lambda spans: len(spans) == 300)
    assert {(one.service, one.instance, one.trace) for one in spans} == {("baton-test", "me", CONTEXT[3:35])}
    assert {one.name: one.error for one in spans if one.error} == {"s7": "broken"}
    assert all(one.ended - one.began == pytest.approx(1.0, abs=1e-3) for one in spans)
    assert sorted(one.attributes["n"] for one in spans) == list(range(300))


def test_without_a_collector_spans_are_dropped_with_a_warning(
    tracer: OtelTracer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(QUEUE_SPANS + 2000):
            tracer.record(span(f"s{number}"))
        tracer.close()  # within its bound, though nobody answers
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("Otel", "otel"))]
    assert any("dropping" in record.message.lower() for record in caplog.records)


def test_an_endpoint_that_is_none_stops_the_start() -> None:
    for wrong in ("localhost:4318", "grpc://x:4317", "http://"):
        with pytest.raises(ConfigError, match="otlp-endpoint"):
            load_settings(GatewaySettings, command="gateway", arguments=["--otlp-endpoint", wrong], environment={})


def test_a_certificate_that_is_no_file_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_CERTIFICATE"):
        open_tracer("https://127.0.0.1:9", service="s", instance="i")
