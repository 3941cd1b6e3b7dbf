"""Conversion of our spans to OpenTelemetry's types, as its processors and exporters read them."""

from __future__ import annotations

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util import types

from common.tracing import Attributes, Span, SpanEvent, Value

SCOPE = InstrumentationScope("baton")
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "consumer": SpanKind.CONSUMER}
_UNSET = Status(StatusCode.UNSET)


class Readable:
    """Converts an ended span to a `ReadableSpan`. `limits` are those of the `OTEL_SPAN_*` variables."""

    def __init__(self, resource: Resource, limits: SpanLimits) -> None:
        self._resource = resource
        self._limits = limits

    def __call__(self, span: Span, offset_ns: int) -> ReadableSpan:
        """Convert; `offset_ns` turns `time.monotonic()` instants into unix time."""
        limits = self._limits
        return ReadableSpan(
            name=_text(span.name),
            context=span_context(span.context),
            parent=span_context(span.parent) if span.parent else None,
            resource=self._resource,
            attributes=_bounded(span.attributes, limits.max_span_attributes, limits.max_span_attribute_length),
            events=[self._event(event, offset_ns) for event in span.events[: limits.max_events]],
            links=[Link(span_context(link)) for link in span.links[: limits.max_links]],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, _text(span.error)) if span.error else _UNSET,
            start_time=int(span.began_at * 1e9) + offset_ns,
            end_time=int(span.ended_at * 1e9) + offset_ns,
            instrumentation_scope=SCOPE,
        )

    def _event(self, event: SpanEvent, offset_ns: int) -> Event:
        limits = self._limits
        attributes = _bounded(event.attributes, limits.max_event_attributes, limits.max_attribute_length)
        return Event(_text(event.name), attributes, timestamp=int(event.at * 1e9) + offset_ns)


def span_context(traceparent: str) -> SpanContext:
    """The ids and flags of a valid W3C `traceparent`."""
    return SpanContext(
        trace_id=int(traceparent[3:35], 16),
        span_id=int(traceparent[36:52], 16),
        is_remote=False,
        trace_flags=TraceFlags(int(traceparent[53:55], 16)),
    )


def traceparent_of(context: SpanContext) -> str:
    """A span's context as a W3C `traceparent`."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _bounded(attributes: Attributes, count: int | None, length: int | None) -> types.Attributes:
    clean = {_text(name): _value(value) for name, value in attributes.items()}
    if length is None and (count is None or len(clean) <= count):
        return clean  # the SDK's class costs 2 us an attribute
    return BoundedAttributes(count, clean, immutable=True, max_value_len=length)


def _value(value: Value) -> Value:
    if isinstance(value, str):
        return _text(value)
    return [_text(item) for item in value] if isinstance(value, list) else value


def _text(text: str) -> str:
    """Replace lone surrogates, which Protocol Buffers refuse and which would cost a whole batch."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
