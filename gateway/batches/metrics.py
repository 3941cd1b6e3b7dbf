"""Prometheus metrics of the Batch API."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.dialect import Answer
from gateway.metrics import GatewayMetrics

STATES = ("completed", "failed", "again", "dropped")


class BatchMetrics:
    """What this gateway did for lines. Their tokens count with everybody's; their times don't: nobody waits for them."""

    def __init__(self, model: str, gateway: GatewayMetrics) -> None:
        registry: CollectorRegistry = gateway.registry
        self._model = model
        self._gateway = gateway
        self._lines = Counter(
            "baton_batch_lines",
            "Lines of batches that this gateway ran, by what became of them",
            ["model_name", "state"],
            registry=registry,
        )
        for state in STATES:  # there from the start: a rate sees only what grows
            self._lines.labels(model, state)
        self._running = Gauge(
            "baton_batch_running_lines", "Lines of batches that run here", ["model_name"], registry=registry
        )
        self._queued = Gauge(
            "baton_batch_queued_lines",
            "Lines of batches in the queue of all gateways, as this one saw it last",
            ["model_name"],
            registry=registry,
        )

        self.running(0)
        self.queued(0)

    def line(self, state: str) -> None:
        """Count a line: see `STATES`."""
        self._lines.labels(self._model, state).inc()

    def running(self, number: int) -> None:
        self._running.labels(self._model).set(number)

    def queued(self, number: int) -> None:
        self._queued.labels(self._model).set(number)

    def tokens(self, answer: Answer) -> None:
        """Count an answer's tokens."""
        metrics, usage = self._gateway, answer.usage()
        metrics.prompt_tokens.labels(self._model).inc(usage["prompt_tokens"])
        metrics.generation_tokens.labels(self._model).inc(usage["completion_tokens"])
        metrics.cached_tokens.labels(self._model).inc(usage["prompt_tokens_details"]["cached_tokens"])
