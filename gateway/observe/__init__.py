"""Metrics, spans, service levels and costs of requests."""
