"""The tracer of a service: a collector, or none."""

from __future__ import annotations

import os
from collections.abc import Mapping

from common.settings import ConfigError
from common.tracing import NoTracer, Tracer

FILES = tuple(
    f"OTEL_EXPORTER_OTLP_{kind}{name}"
    for kind in ("", "TRACES_")
    for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def open_tracer(
    endpoint: str,
    *,
    service: str,
    instance: str,
    rest_share: float = 1.0,
    variables: Mapping[str, str] = os.environ,
) -> Tracer:
    """The tracer for the collector at `endpoint`, or in OpenTelemetry's own variables. Raises ConfigError.

    `rest_share`: the share of traces to send that were not marked as worth keeping.
    """
    if not (endpoint or any(variables.get(name) for name in ENDPOINTS)) or is_off(variables):
        return NoTracer()
    for name in FILES:
        if (path := variables.get(name)) and not os.access(path, os.R_OK):
            raise ConfigError(f"{name} {path}: not a readable file")
    try:
        from telemetry.tracer import OtelTracer  # loaded only by processes that send traces
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint {endpoint}: {error.name} is not installed: pip install the extra 'otel' (pyproject.toml)"
        ) from error
    try:
        return OtelTracer(endpoint, service=service, instance=instance, rest_share=rest_share, variables=variables)
    except ValueError as error:
        raise ConfigError(f"OpenTelemetry's variables: {error}") from error


def is_off(variables: Mapping[str, str]) -> bool:
    """True if OpenTelemetry's variables turn traces off."""
    disabled = variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return disabled or variables.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
