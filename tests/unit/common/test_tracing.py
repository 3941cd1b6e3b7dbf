"""Contexts of spans, and what becomes of spans that nobody takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.config import ConfigError, GatewaySettings, load_settings
from common.servers import free_port
from common.tracing import Span, child_of, is_sampled, new_trace, valid
from services.otlp import MAX_QUEUED, OtlpTracer
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
    assert not is_sampled("")


def test_opentelemetry_s_sdk_is_needed_only_with_an_endpoint_and_then_its_lack_is_one_clear_line() -> None:
    code = """
import sys
sys.modules["opentelemetry.sdk"] = sys.modules["opentelemetry.exporter"] = None  # as if they were not installed
import services.gateway.__main__, services.worker_process
from common.config import ConfigError
from common.tracing import NoTracer
from services.tracing import open_tracer
assert isinstance(open_tracer("", service="s", instance="i"), NoTracer)
try:
    open_tracer("http://127.0.0.1:4318", service="s", instance="i")
except ConfigError as error:
    assert "--otlp-endpoint" in str(error) and "install" in str(error), error
else:
    raise AssertionError("opened")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


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
