"""Sends spans to an OpenTelemetry collector: OTLP over HTTP, in batches, from a thread of its own.

Needs the extra `tracing`. Headers, certificates and compression come from OpenTelemetry's own variables
(`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`, …), which its exporter reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from common.tracing import Span, is_sampled

log = logging.getLogger("baton.otlp")

MAX_QUEUED = 8192  # spans; beyond them the oldest are dropped
BATCH = 128  # spans encoded at once: the interpreter is this thread's meanwhile
SEND_EVERY_S = 1.0
EXPORT_TIMEOUT_S = 3.0
CLOSE_S = 3.0

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("baton")
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "consumer": SpanKind.CONSUMER}


class OtlpTracer:
    """A `common.tracing.Tracer`."""

    def __init__(self, endpoint: str, *, service: str, instance: str) -> None:
        url = endpoint.rstrip("/")
        self._exporter = OTLPSpanExporter(
            endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces", timeout=EXPORT_TIMEOUT_S
        )
        self._resource = Resource.create(
            {"service.name": f"baton-{service}", "service.namespace": "baton", "service.instance.id": instance}
        )
        self._queue: deque[Span] = deque(maxlen=MAX_QUEUED)
        self._wake = threading.Event()
        self._closing = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Spans that are not being sent yet."""
        return len(self._queue)

    def wants(self, context: str) -> bool:
        return is_sampled(context)

    def record(self, span: Span) -> None:
        if len(self._queue) == MAX_QUEUED:
            self.dropped += 1
        self._queue.append(span)

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        told = 0
        closing = False
        while not closing:
            self._wake.wait(SEND_EVERY_S)
            closing = self._closing  # then what is queued now is the last
            self._send_queued()
            if self.dropped > told:
                told = self.dropped
                log.warning("otlp.dropped", extra={"spans": told})

    def _send_queued(self) -> None:
        """Until the queue is empty or the collector doesn't take a batch, which is lost then."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            spans = [self._readable(span, offset_ns) for span in batch]
            try:
                if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                    continue
            except Exception as error:  # a thread that died would be a silent one
                log.warning("otlp.failed", extra={"error": f"{type(error).__name__}: {error}"[:200]})
            self.dropped += len(batch)
            return

    def _readable(self, span: Span, offset_ns: int) -> ReadableSpan:
        def unix_ns(at: float) -> int:
            return int(at * 1e9) + offset_ns

        return ReadableSpan(
            name=span.name,
            context=_context(span.context, remote=False),
            parent=_context(span.parent, remote=True) if span.parent else None,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, unix_ns(event.at)) for event in span.events],
            links=[Link(_context(link, remote=True)) for link in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=unix_ns(span.began_at),
            end_time=unix_ns(span.ended_at),
            instrumentation_scope=_SCOPE,
        )


def _context(traceparent: str, *, remote: bool) -> SpanContext:
    return SpanContext(int(traceparent[3:35], 16), int(traceparent[36:52], 16), remote, _SAMPLED)
