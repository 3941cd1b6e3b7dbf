"""Sends spans to an OpenTelemetry collector: OTLP over HTTP, in batches, from a thread of its own.

Headers, certificates, compression and further attributes of the resource come from OpenTelemetry's own variables
(`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`, `OTEL_RESOURCE_ATTRIBUTES`, …).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable

from common.tracing import Span, valid
from services.otlp.collector import Collector, CollectorError, resource_attributes
from services.otlp.wire import export_request, resource_of

log = logging.getLogger("baton.otlp")

MAX_QUEUED = 8192  # spans; beyond them the oldest are dropped
BATCH = 512  # spans of one request to the collector
SEND_EVERY_S = 2.0
CLOSE_S = 3.0


class OtlpTracer:
    """A `common.tracing.Tracer`."""

    def __init__(self, endpoint: str, *, service: str, instance: str) -> None:
        self._collector = Collector(endpoint)
        names = {"service.name": f"baton-{service}", "service.namespace": "baton", "service.instance.id": instance}
        self._resource = resource_of(resource_attributes() | names)
        self._queue: deque[Span] = deque(maxlen=MAX_QUEUED)
        self._unsent: tuple[bytes, int] | None = None  # a request that the collector could not take, and its spans
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

    def keep(self, traces: Iterable[str]) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        told = 0
        closing = False
        while not closing:
            self._wake.wait(SEND_EVERY_S)
            closing = self._closing  # then what is queued now is the last
            try:
                self._send_queued()
            except Exception:  # a thread that died would be a silent one
                log.exception("otlp.crashed")
            if self.dropped > told:
                told = self.dropped
                log.warning("otlp.dropped", extra={"spans": told})
        self._collector.close()

    def _send_queued(self) -> None:
        """Until the queue is empty, or the collector doesn't take a request: that one is kept, and sent first the next time."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        while self._unsent or self._queue:
            if self._unsent is None:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                self._unsent = export_request(self._resource, batch, offset_ns=offset_ns), len(batch)
            body, count = self._unsent
            try:
                self._collector.send(body)
            except CollectorError as error:
                log.warning("otlp.failed", extra={"error": str(error), "again": error.again})
                if error.again and not self._closing:
                    return
                self.dropped += count
                if self._closing:
                    self.dropped += len(self._queue)
                    return
            self._unsent = None


def is_sampled(context: str) -> bool:
    """Whether whoever began the trace wants it recorded. Not if it is no context: another process sent it."""
    return bool(valid(context)) and bool(int(context[53:55], 16) & 1)
