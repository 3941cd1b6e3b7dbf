"""Where a service's spans go."""

from __future__ import annotations

from common.config import ConfigError
from common.tracing import NoTracer, Tracer


def open_tracer(endpoint: str, *, service: str, instance: str) -> Tracer:
    """The tracer that sends to the collector at `endpoint` (OTLP over HTTP). Raises ConfigError without the extra `tracing`."""
    if not endpoint:
        return NoTracer()
    try:
        from services.otlp import OtlpTracer
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint: {error}; install opentelemetry-exporter-otlp-proto-http") from error
    return OtlpTracer(endpoint, service=service, instance=instance)
