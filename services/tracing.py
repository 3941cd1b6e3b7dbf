"""Where a service's spans go."""

from __future__ import annotations

from common.config import ConfigError
from common.tracing import NoTracer, Tracer


def open_tracer(endpoint: str, *, service: str, instance: str) -> Tracer:
    """The tracer that sends to the collector at `endpoint` (OTLP over HTTP). Raises ConfigError."""
    if not endpoint:
        return NoTracer()
    from services.otlp.tracer import OtlpTracer  # whoever sends no traces doesn't load it

    try:
        return OtlpTracer(endpoint, service=service, instance=instance)
    except OSError as error:  # a certificate that is none
        raise ConfigError(f"--otlp-endpoint {endpoint}: {error}; see OTEL_EXPORTER_OTLP_CERTIFICATE") from error
