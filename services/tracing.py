"""Where a service's spans go."""

from __future__ import annotations

from common.config import ConfigError
from common.tracing import NoTracer, Tracer


def open_tracer(endpoint: str, *, service: str, instance: str, rest_share: float = 1.0) -> Tracer:
    """The tracer that sends to the collector at `endpoint` (OTLP over HTTP). Raises ConfigError.

    `rest_share`: of the traces that nobody said are worth keeping.
    """
    if not endpoint:
        return NoTracer()
    from services.otlp.tail import TailTracer  # whoever sends no traces doesn't load it
    from services.otlp.tracer import OtlpTracer

    try:
        tracer = OtlpTracer(endpoint, service=service, instance=instance)
        return tracer if rest_share >= 1 else TailTracer(tracer, rest_share=rest_share)
    except OSError as error:  # a certificate that is none
        raise ConfigError(f"--otlp-endpoint {endpoint}: {error}; see OTEL_EXPORTER_OTLP_CERTIFICATE") from error
