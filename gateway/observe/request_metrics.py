"""Observers of ended requests, from their timelines: metrics, a log line, and the usage of their keys.

Metrics: vLLM's histograms, attempts, SLO attainment. A log line never has a request's contents, and only the name of its key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from common.messages.arrivals import RateLimit
from gateway.observe.fleet_metrics import DEVICE_TIER
from gateway.observe.instruments import Counter, Histogram, ModelLabels
from gateway.request.attempt import WORKER_WAITS, AttemptLine
from gateway.request.refused import Refused
from gateway.request.timeline import Timeline
from gateway.tenants.tenants import Tenant
from gateway.tenants.usage import Usage

log = logging.getLogger("baton.requests")

Logged = Literal["off", "errors", "all"]
MAX_REFUSALS_A_SECOND = 20  # anybody may cause refusals

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    60,
    120,
    300,
    600,
)
_TPOT = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_ATTEMPTS = (1, 2, 3, 4)


class RequestMetrics:
    """Observes each request once, at its end."""

    def __init__(self, models: Sequence[str], registry: CollectorRegistry) -> None:
        self._models = ModelLabels(models)
        self._registry = registry
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Submitted to first chunk", _SECONDS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "First chunk to first token", _SECONDS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First to last token", _SECONDS)
        self._inference = self._histogram("vllm:request_inference_time_seconds", "First chunk to last token", _SECONDS)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of each token after the first", _TPOT
        )
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._generated = self._histogram("vllm:request_generation_tokens", "Generated tokens of a request", _TOKENS)
        self._attempts = self._histogram("baton_request_attempts", "Attempts that a request took", _ATTEMPTS)
        self._ended = self._counter("baton_requests", "Requests that ended, by how", "status")
        self._met = self._counter(
            "baton_slo_requests", "Requests with an answer or an error, by the target missed", "missed"
        )
        self._good_tokens = self._counter("baton_slo_good_tokens", "Generated tokens of requests that met the SLO")
        self._waits = self._counter(
            "baton_prompt_wait_seconds", "Time that prompts waited before their first chunk, by the reason", "reason"
        )
        self._hits = self._counter(
            "baton_prefix_hit_tokens",
            "Prompt tokens from a cache, by its tier, and whether the index sent the request there or the worker just had them",
            "tier",
            "placed_by",
        )
        self._lost_hits = self._counter(
            "baton_prefix_lost_tokens", "Prompt tokens that the index said were cached, and were not"
        )
        for model in self._models.names:  # a rate needs an initial sample
            for placed_by in ("index", "worker"):
                self._hits.labels(model, DEVICE_TIER, placed_by)
            self._lost_hits.labels(model)
            for reason in ("claim", *WORKER_WAITS):
                self._waits.labels(model, reason)
            for missed in ("none", "ttft", "tpot", "error"):
                self._met.labels(model, missed)

    def observe(self, timeline: Timeline) -> None:
        model = self._models.of(timeline.model)
        self._ended.labels(model, timeline.status).inc()
        if timeline.attempts:
            self._observe(model, self._attempts, timeline.num_attempts)
            self._count_hits(model, timeline.attempts)
        for reason, waited_s in waits(timeline):
            self._waits.labels(model, reason).inc(waited_s)
        if timeline.status == "cancelled":
            return  # the client's wish: neither good nor bad
        missed = timeline.missed
        if not timeline.patient:
            self._met.labels(model, missed or "none").inc()
        if timeline.status == "error":
            return
        if not missed and not timeline.patient:
            self._good_tokens.labels(model).inc(timeline.completion_tokens)
        self._observe(model, self._prompt, timeline.prompt_tokens)
        self._observe(model, self._generated, timeline.completion_tokens)
        first, last = timeline.first_token_at, timeline.ended_at
        attempt = next((line for line in timeline.attempts if line.first_token_at is not None), None)
        if first is None or last is None or attempt is None:
            return
        prefill_s = (attempt.prefill_ms or 0.0) / 1000
        self._observe(model, self._prefill, prefill_s)
        self._observe(model, self._queue, max(0.0, first - prefill_s - timeline.submitted_at))
        self._observe(model, self._decode, last - first)
        self._observe(model, self._inference, prefill_s + last - first)
        if timeline.tpot_s is not None:
            self._observe(model, self._tpot, timeline.tpot_s)

    def _count_hits(self, model: str, attempts: Iterable[AttemptLine]) -> None:
        for attempt in attempts:
            if attempt.cached_tokens is not None:
                cached, promised = attempt.cached_tokens, attempt.promised_tokens
                self._hits.labels(model, DEVICE_TIER, "index").inc(min(cached, promised))
                self._hits.labels(model, DEVICE_TIER, "worker").inc(max(0, cached - promised))
                self._lost_hits.labels(model).inc(max(0, promised - cached))

    def _observe(self, model: str, histogram: Histogram, value: float) -> None:
        histogram.labels(model).observe(value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self._registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self._registry)


def waits(timeline: Timeline) -> Iterator[tuple[str, float]]:
    """Reasons for which a prompt waited, with seconds.

    `place`: admission starts as many requests as there are places. `claim`: no worker took the job. The others: `WORKER_WAITS`.
    """
    yield "place", timeline.waited_ms / 1000
    for attempt in timeline.attempts:
        if attempt.published_at is not None and attempt.claimed_at is not None:
            yield "claim", max(0.0, attempt.claimed_at - attempt.published_at)
        for reason, waited_ms in attempt.waits_ms.items():
            yield reason, max(0.0, waited_ms) / 1000


class RequestLog:
    """`errors`: only failed or refused ones. An error's text may quote the request, so only its code is logged."""

    def __init__(self, logged: Logged) -> None:
        self._logged = logged
        self._limit = RateLimit(MAX_REFUSALS_A_SECOND)
        self._unsaid = 0

    def ended(self, line: Timeline) -> None:
        """Log an ended choice."""
        failed = line.status == "error"
        if self._logged == "off" or (self._logged == "errors" and not failed):
            return
        attempt = line.attempt
        facts = _who(line.request_id, line.traceparent[3:35], line.asker, line.model) | {
            "outcome": line.status,
            "code": line.detail.partition(":")[0] if failed else "",
            "why": line.detail if line.status == "cancelled" else "",
            "prompt_tokens": line.prompt_tokens,
            "cached_tokens": line.cached_tokens,
            "completion_tokens": line.completion_tokens,
            **_drafts(line),
            "ttft_ms": None if line.ttft_ms is None else round(line.ttft_ms, 1),
            "total_ms": None if line.ended_at is None else round(1000 * (line.ended_at - line.received_at), 1),
            "placement": attempt.reason if attempt else "",
            "prefill": (attempt.claimed_by or attempt.prefill) if attempt else "",
            "decode": attempt.decoder if attempt else "",
            "attempts": line.num_attempts if line.num_attempts > 1 else None,
        }
        log.log(
            logging.WARNING if failed else logging.INFO, f"request.{'failed' if failed else 'done'}", extra=_told(facts)
        )

    def refused(self, one: Refused) -> None:
        """Log a request that was refused before it ran."""
        facts = _who(one.request_id, one.trace_id, one.asker, one.model)
        self._refuse(facts | {"outcome": "refused", "code": one.code, "total_ms": round(one.took_ms, 1)})

    def unauthorized(self, request_id: str, path: str) -> None:
        """Log a request without a key for its path."""
        self._refuse({"request_id": request_id, "outcome": "refused", "code": "invalid_api_key", "path": path[:200]})

    def _refuse(self, facts: dict[str, Any]) -> None:
        if self._logged == "off":
            return
        if not self._limit.allows():
            self._unsaid += 1
            return
        log.info("request.refused", extra=_told(facts | {"unsaid": self._unsaid or None}))
        self._unsaid = 0


def _who(request_id: str, trace_id: str, asker: Tenant, model: str) -> dict[str, Any]:
    return {"request_id": request_id, "trace_id": trace_id, "tenant": asker.name, "key": asker.key, "model": model}


def _drafts(line: Timeline) -> dict[str, int]:
    drafted, accepted = line.frames.drafted, line.frames.accepted
    return {"drafted_tokens": drafted, "accepted_tokens": accepted} if drafted else {}


def _told(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value not in (None, "")}


def count_usage(usage: Usage, line: Timeline) -> None:
    """Count an ended request for its key."""
    read = line.first_token_at is not None
    counts = [1, int(line.status == "error"), line.prompt_tokens if read else 0, line.cached_tokens if read else 0]
    usage.add(line.asker.key, line.tenant, [*counts, line.completion_tokens], now=time.time())
