"""Our counters and histograms say what prometheus_client's say of the same numbers."""

from __future__ import annotations

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as open_metrics

from gateway.observe.instruments import Counter, Histogram

BOUNDS = (0.002, 0.5, 1, 2.5, 1000)


def test_they_are_shown_as_prometheus_client_shows_its_own() -> None:
    disable_created_metrics()
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    pairs = [
        (
            kind.Counter("vllm:tokens", "So many", ["model_name", "kind"], registry=registry),
            kind.Histogram("baton_some_seconds", "So long", ["model_name"], registry=registry, buckets=BOUNDS),
        )
        for kind, registry in ((prometheus_client, theirs), (_Ours, ours))
    ]
    rnd = random.Random(7)
    values = [*BOUNDS, 0.0, 1e9, *(rnd.uniform(0, 4) for _ in range(50))]
    for counter, histogram in pairs:
        counter.labels("m", "never")
        for number, value in enumerate(values):
            counter.labels("m", "a").inc()
            counter.labels("m", "b").inc(value)
            histogram.labels(f"m{number % 2}").observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
    assert open_metrics(ours, ALLOWUTF8) == open_metrics(theirs, ALLOWUTF8)
    assert b'baton_some_seconds_bucket{le="+Inf",model_name="m0"} 29.0' in generate_latest(ours)


class _Ours:
    Counter, Histogram = Counter, Histogram


def test_a_counter_only_grows_and_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    counter = Counter("baton_things", "Things", ["kind"], registry=registry)
    with pytest.raises(ValueError, match="only grows"):
        counter.labels("a").inc(-1)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("baton_things", "Others", ["kind"], registry=registry, buckets=(1,))
