"""An OpenTelemetry collector of a few lines: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True, slots=True, kw_only=True)
class SunkSpan:
    """A span as it came over the wire. Instants are unix seconds."""

    trace: str
    id: str
    parent: str
    name: str
    service: str  # of the resource
    instance: str
    began: float
    ended: float
    error: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[str] = field(default_factory=list)
    kind: int = 0


class OtlpSink:
    """Listens on an ephemeral loopback port."""

    def __init__(self) -> None:
        self.spans: list[SunkSpan] = []
        self.headers: dict[str, str] = {}  # of the last request, names in lower case
        self.refusing = 0  # the status to refuse requests with; 0 = take them
        self._refused = 0
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                sink.headers = {name.lower(): value for name, value in self.headers.items()}
                if sink.refusing:
                    self.send_response(sink.refusing)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    sink._refused += 1
                    return
                if self.headers.get("content-encoding") == "gzip":
                    raw = gzip.decompress(raw)
                sink.spans += _spans_of(ExportTraceServiceRequest.FromString(raw))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    async def until(self, holds: Callable[[list[SunkSpan]], bool], timeout_s: float = 60.0) -> list[SunkSpan]:
        """Wait until `holds(spans)`; return them."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds(self.spans):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"spans so far: {sorted((s.name, s.instance, s.error) for s in self.spans)}") from None
        return list(self.spans)

    async def until_refused(self) -> None:
        """Wait until one more request was refused."""
        before = self._refused
        async with asyncio.timeout(60.0):
            while self._refused == before:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def otlp_sink() -> AsyncIterator[OtlpSink]:
    sink = OtlpSink()
    try:
        yield sink
    finally:
        await asyncio.to_thread(sink.close)


def _spans_of(request: ExportTraceServiceRequest) -> list[SunkSpan]:
    spans = []
    for group in request.resource_spans:
        resource = _dict(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                spans.append(
                    SunkSpan(
                        trace=span.trace_id.hex(),
                        id=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        name=span.name,
                        service=resource["service.name"],
                        instance=resource["service.instance.id"],
                        began=span.start_time_unix_nano / 1e9,
                        ended=span.end_time_unix_nano / 1e9,
                        error=span.status.message,
                        attributes=_dict(span.attributes),
                        events=[(event.name, _dict(event.attributes)) for event in span.events],
                        links=[link.span_id.hex() for link in span.links],
                        kind=span.kind,
                    )
                )
    return spans


def _dict(attributes: Any) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
