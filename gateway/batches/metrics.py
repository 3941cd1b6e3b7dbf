"""Prometheus metrics of the Batch API."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.answers.answer import Answer
from gateway.observe.instruments import ModelLabels
from gateway.observe.metrics import GatewayMetrics

STATES = ("completed", "failed", "again", "dropped")


class BatchMetrics:
    """Counters of batch lines run by this gateway. Nobody waits for lines, so their times are not measured."""

    def __init__(self, models: Sequence[str], gateway: GatewayMetrics) -> None:
        registry: CollectorRegistry = gateway.registry
        self._models = ModelLabels(models)
        self._gateway = gateway
        self._lines = Counter(
            "baton_batch_lines",
            "Lines of batches that this gateway ran, by what became of them",
            ["model_name", "state"],
            registry=registry,
        )
        for model in self._models.names:  # a rate needs an initial sample
            for state in STATES:
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

    def line(self, state: str, *, model: str = "") -> None:
        """Count a line: see `STATES`. No `model`: the line was not read."""
        self._lines.labels(self._models.of(model), state).inc()

    def running(self, number: int) -> None:
        self._running.labels(self._models.first).set(number)

    def queued(self, number: int) -> None:
        self._queued.labels(self._models.first).set(number)

    def tokens(self, answer: Answer) -> None:
        usage = answer.usage()
        self._gateway.tokens.add(
            answer.own_model, prompt=usage.prompt_tokens, generated=usage.completion_tokens, cached=usage.cached_tokens
        )
