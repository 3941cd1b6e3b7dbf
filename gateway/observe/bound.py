"""Metrics whose children are looked up once: prometheus_client locks and copies the labels each time."""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram

Metric = TypeVar("Metric", Counter, Histogram)


class Bound(Generic[Metric]):
    """A metric, and its children by their labels. There must be a bounded number of these, as in any metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric: Metric = metric
        self._children: dict[tuple[str, ...], Metric] = {}

    def labels(self, *values: str) -> Metric:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*values)
        return child
