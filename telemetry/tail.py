"""Tail sampling: the outcome of a request decides whether its trace is sent, and every process decides alike.

The gateway knows at the end whether a request was slow, failed or was moved. It keeps such traces and names them in its
heartbeats. A share of the others is sent, chosen by the trace's id. Spans wait here until their trace is decided.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

MAX_HELD_SPANS = 16_384  # beyond this the oldest traces are dropped
MAX_KEPT_TRACES = 8192  # spans may still come after their request ended


class TailSampling(SpanProcessor):
    """A span processor that wraps another one."""

    def __init__(self, inner: SpanProcessor, *, rest_share: float) -> None:
        self._inner = inner
        self._send_below = int(rest_share * 2**32)
        self._held: OrderedDict[int, list[ReadableSpan]] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.num_held = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """No-op: nothing is decided before a span ends."""

    def on_end(self, span: ReadableSpan) -> None:
        """Forward a span of a kept trace; hold any other until its trace is decided."""
        context = span.get_span_context()
        assert context is not None
        trace = context.trace_id
        # The low 32 bits of a trace id are random, whoever made it.
        if trace in self._kept or trace & 0xFFFF_FFFF < self._send_below:
            self._inner.on_end(span)
            return
        self._held.setdefault(trace, []).append(span)
        self.num_held += 1
        while self.num_held > MAX_HELD_SPANS:
            self.num_held -= len(self._held.popitem(last=False)[1])

    def keep(self, traces: Iterable[int]) -> None:
        """Forward the held spans of these traces, and any later ones. Idempotent."""
        for trace in traces:
            self._kept[trace] = None
            held = self._held.pop(trace, [])
            self.num_held -= len(held)
            for span in held:
                self._inner.on_end(span)
        while len(self._kept) > MAX_KEPT_TRACES:
            self._kept.popitem(last=False)

    def shutdown(self) -> None:
        """Drop what is held; send what is queued."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what is queued."""
        return self._inner.force_flush(timeout_millis)
