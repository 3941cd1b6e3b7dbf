"""Sends spans to a collector with OpenTelemetry's SDK: its batches, its exporter (OTLP over HTTP), its variables.

Spans are made after the fact (`common.tracing`), so nothing is started on the way of a token: a span that ended goes to
`BatchSpanProcessor`, whose thread encodes and sends. The `OTEL_*` variables mean what OpenTelemetry says they mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.tracing import Span, valid
from telemetry.spans import Readable, traceparent_of
from telemetry.tail import TailSampling

QUEUE_SPANS = 8192  # beyond this the oldest spans are dropped
BATCH_SPANS = 512
SEND_EVERY_MS = 2000.0
CLOSE_S = 3.0

_PROPAGATOR = TraceContextTextMapPropagator()
_IDS = RandomIdGenerator()


class OtelTracer:
    """A `common.tracing.Tracer` over OTLP. `endpoint` "": use `OTEL_EXPORTER_OTLP_*`.

    `rest_share`: the share of traces to send that nobody said are worth keeping.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        service: str,
        instance: str,
        rest_share: float = 1.0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        said = variables or {}
        exporter = OTLPSpanExporter(endpoint=traces_url(endpoint) or None)
        self._exporter = exporter
        batches = BatchSpanProcessor(
            exporter,
            max_queue_size=None if "OTEL_BSP_MAX_QUEUE_SIZE" in said else QUEUE_SPANS,
            max_export_batch_size=None if "OTEL_BSP_MAX_EXPORT_BATCH_SIZE" in said else BATCH_SPANS,
            schedule_delay_millis=None if "OTEL_BSP_SCHEDULE_DELAY" in said else SEND_EVERY_MS,
        )
        self._tail = TailSampling(batches, rest_share=rest_share) if rest_share < 1 else None
        self._processor: SpanProcessor = self._tail or batches
        self._readable = Readable(resource_of(service, instance), SpanLimits())
        self._sampler = TracerProvider().sampler  # as OTEL_TRACES_SAMPLER says; by default all

    def wants(self, context: str) -> bool:
        return is_sampled(context)

    def parent_of(self, headers: Mapping[str, str]) -> str:
        context = api.get_current_span(_PROPAGATOR.extract(headers)).get_span_context()
        return traceparent_of(context) if context.is_valid else ""

    def new_trace(self) -> str:
        trace_id = _IDS.generate_trace_id()
        is_wanted = self._sampler.should_sample(None, trace_id, "request").decision.is_sampled()
        return traceparent_of(SpanContext(trace_id, _IDS.generate_span_id(), False, TraceFlags(int(is_wanted))))

    def record(self, span: Span) -> None:
        self._processor.on_end(self._readable(span, time.time_ns() - time.monotonic_ns()))

    def keep(self, traces: Iterable[str]) -> None:
        if self._tail is not None:
            self._tail.keep(int(trace, 16) for trace in traces)

    def flush(self) -> None:
        """Send what is queued; blocks."""
        self._processor.force_flush()

    def close(self) -> None:
        # The SDK waits half a minute for a collector that doesn't answer; a stopping service must not.
        closing = threading.Thread(target=self._processor.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # stops its retries; queued spans are dropped
            closing.join(1.0)


def resource_of(service: str, instance: str) -> Resource:
    """Return the resource of spans. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` take precedence."""
    ours = {"service.name": f"baton-{service}", "service.namespace": "baton", "service.instance.id": instance}
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def traces_url(endpoint: str) -> str:
    """The URL for traces at a collector's address: OTLP over HTTP has a path for each signal."""
    base = endpoint.rstrip("/")
    return base if not base or base.endswith("/v1/traces") else f"{base}/v1/traces"


def is_sampled(context: str) -> bool:
    """True if the trace's originator wants it recorded. False for invalid contexts."""
    return bool(valid(context)) and bool(int(context[53:55], 16) & 1)
