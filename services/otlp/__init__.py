"""OpenTelemetry's protocol (OTLP), without OpenTelemetry's packages: traces from a thread to a collector, over HTTP."""
