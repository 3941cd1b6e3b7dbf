"""Counters and histograms that cost a fraction of a microsecond, for events of each request or token.

prometheus_client's own lock, look through all buckets and check themselves each time. Called from the event loop's thread alone;
whoever renders `/metrics` reads single numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Count:
    """A counter's child."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add to the counter. Raises ValueError for a negative amount."""
        if amount < 0:
            raise ValueError("a counter only grows")
        self.value += amount


class Distribution:
    """A histogram's child."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class Counter:
    """The interface of prometheus_client's. Label values must be bounded in number."""

    def __init__(self, name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._named = name, text, tuple(labels)
        self._children = defaultdict[tuple[str, ...], Count](Count)
        registry.register(self)

    def labels(self, *values: str) -> Count:
        return self._children[values]

    def describe(self) -> Iterable[CounterMetricFamily]:
        name, text, labels = self._named
        return [CounterMetricFamily(name, text, labels=labels)]

    def collect(self) -> Iterable[CounterMetricFamily]:
        [family] = self.describe()
        for values, child in list(self._children.items()):
            family.add_metric(values, child.value)
        return [family]


class Histogram:
    """The interface of prometheus_client's: `buckets` are upper bounds, infinity is added."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._named = name, text, tuple(labels)
        self._bounds = tuple(map(float, buckets))
        self._shown = [*map(floatToGoString, (*self._bounds, inf))]
        self._children = defaultdict[tuple[str, ...], Distribution](lambda: Distribution(self._bounds))
        registry.register(self)

    def labels(self, *values: str) -> Distribution:
        return self._children[values]

    def describe(self) -> Iterable[HistogramMetricFamily]:
        name, text, labels = self._named
        return [HistogramMetricFamily(name, text, labels=labels)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        [family] = self.describe()
        for values, child in list(self._children.items()):
            buckets, total = [], 0
            for bound, count in zip(self._shown, child.counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric(values, buckets, child.sum)
        return [family]


class ModelLabels:
    """Label values of models."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` may grow."""
        self.names = names

    @property
    def first(self) -> str:
        """The label of figures without a model; "" where none generates."""
        return self.names[0] if self.names else ""

    def of(self, model: str) -> str:
        """The label of a model; the first one's for unknown names."""
        return model if model in self.names else self.first
