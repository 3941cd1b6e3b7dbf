"""Prometheus metrics of what the Responses API keeps."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

KEPT = ("kept", "not_kept")
STATES = ("completed", "incomplete", "failed", "cancelled", "again")


class KeptMetrics:
    """Counts of stored responses, and of background responses taken here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._kept = Counter(
            "baton_kept_responses", "Responses that were to be kept, by whether they are", ["state"], registry=registry
        )
        self._background = Counter(
            "baton_background_responses",
            "Background responses that this gateway took, by what became of them",
            ["state"],
            registry=registry,
        )
        self._running = Gauge("baton_background_running", "Background responses that are made here", registry=registry)
        for state in KEPT:  # a rate needs an initial sample
            self._kept.labels(state)
        for state in STATES:
            self._background.labels(state)

    def kept(self, state: str) -> None:
        self._kept.labels(state).inc()

    def background(self, state: str) -> None:
        self._background.labels(state).inc()

    def running(self, number: int) -> None:
        self._running.set(number)
