"""Metrics by tenant: usage, cost, and budgets taken, with a bounded number of labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from common.messages import WorkerState
from gateway.observe.instruments import Counter, ModelLabels
from gateway.request.attempt import AttemptLine
from gateway.request.timeline import Timeline
from gateway.tenants.budgets import Budgets, Left, Limits

MAX_TENANTS = 100  # further tenants share the label OTHERS
OTHERS = "(others)"  # can't be a tenant's name
FRESH_S = 1.0  # budgets and rates are read at most this often


@dataclass(frozen=True, slots=True)
class DeviceSeconds:
    """The summed cost of a request's attempts."""

    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates by worker. Without a measurement, a worker counts as the mean of the others."""

    token_s: Mapping[str, float] = field(default_factory=dict)  # seconds per prompt token
    step_s: Mapping[str, float] = field(default_factory=dict)  # seconds per generated token

    @classmethod
    def of(cls, workers: Iterable[WorkerState]) -> Rates:
        states = list(workers)
        token_s = {one.worker: 1 / one.prefill_tokens_per_s for one in states if one.prefill_tokens_per_s > 0}
        step_s = {
            one.worker: one.decode_step_ms / 1000 / max(1, one.running) for one in states if one.decode_step_ms > 0
        }
        return cls(token_s, step_s)


def device_seconds(line: Timeline, rates: Rates) -> DeviceSeconds:
    """The cost of an ended request.

    An attempt without a first token is free: nobody knows how much was computed.
    """
    attempts = [attempt for attempt in line.attempts if attempt.first_token_at is not None]
    return DeviceSeconds(
        prefill=sum(_computed(attempt) * _rate(rates.token_s, attempt.claimed_by) for attempt in attempts),
        decode=sum(
            _stepped(attempt) * _rate(rates.step_s, attempt.decoder or attempt.claimed_by) for attempt in attempts
        ),
    )


def _computed(attempt: AttemptLine) -> int:
    cached = attempt.promised_tokens if attempt.cached_tokens is None else attempt.cached_tokens
    return max(1, attempt.prompt_tokens - cached)


def _stepped(attempt: AttemptLine) -> int:
    return max(0, attempt.num_tokens - 1)  # prefill samples the first one


def _rate(rates: Mapping[str, float], worker: str) -> float:
    if worker in rates or not rates:
        return rates.get(worker, 0.0)
    return sum(rates.values()) / len(rates)


class TenantLabels:
    """Label values: the first tenants by name, later ones together."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, tenant: str) -> str:
        """The label of a tenant; it never changes."""
        if tenant not in self._known:
            if len(self._known) >= self._most:
                return OTHERS
            self._known.add(tenant)
        return tenant


@dataclass(slots=True)
class Spent:
    """A tenant's usage by ended requests, since the start."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0  # device seconds
    decode_s: float = 0.0
    judged: int = 0  # requests with an answer or an error, but of the lowest tier
    good: int = 0  # judged ones that missed nothing


@dataclass(slots=True)
class _Seen:
    at: float = -FRESH_S
    left: Mapping[str, Left] = field(default_factory=dict)


class TenantMetrics:
    """Takes ended requests; reads budgets when scraped."""

    def __init__(
        self,
        models: Sequence[str],
        registry: CollectorRegistry,
        *,
        workers: Callable[[], Iterable[WorkerState]],
        budgets: Budgets,
        limits: Callable[[], Mapping[str, Limits]],
        labels: TenantLabels,
    ) -> None:
        self._models = ModelLabels(models)
        self._workers = workers
        self._budgets = budgets
        self._limits = limits
        self._labels = labels
        self._seen = _Seen()
        self._rates = -FRESH_S, Rates()
        self._spent: dict[str, Spent] = {}
        names = ["model_name", "tenant"]
        self._seconds = Counter(
            "baton_tenant_device_seconds",
            "Cost: tokens by the rates that workers measure",
            [*names, "phase"],
            registry=registry,
        )
        self._requests = Counter("baton_tenant_requests", "Requests that ended", names, registry=registry)
        self._judged = Counter(
            "baton_tenant_slo_requests",
            "Requests with an answer or an error, by the part of their goal that was missed",
            [*names, "missed"],
            registry=registry,
        )
        self._slack = Counter(
            "baton_tenant_slo_seconds",
            "Seconds that goals give (of=goal) and that answers took of them (of=taken), until the first token and after it",
            [*names, "part", "of"],
            registry=registry,
        )
        self._limit = Gauge(
            "baton_tenant_budget_limit", "Of a tenant over all gateways", [*names, "budget"], registry=registry
        )
        self._used = Gauge(
            "baton_tenant_budget_used",
            "Of the limit, now: requests and tokens come back evenly within a minute",
            [*names, "budget"],
            registry=registry,
        )

    def observe(self, timeline: Timeline) -> None:
        tenant, model = self._labels.of(timeline.tenant), self._models.of(timeline.model)
        cost = device_seconds(timeline, self._rates_now())
        self._requests.labels(model, tenant).inc()
        self._seconds.labels(model, tenant, "prefill").inc(cost.prefill)
        self._seconds.labels(model, tenant, "decode").inc(cost.decode)
        spent = self._spent.setdefault(tenant, Spent())
        spent.requests += 1
        spent.completion_tokens += timeline.completion_tokens
        if timeline.first_token_at is not None:
            spent.prompt_tokens += timeline.prompt_tokens
            spent.cached_tokens += timeline.cached_tokens
        spent.prefill_s += cost.prefill
        spent.decode_s += cost.decode
        if timeline.status != "cancelled" and not timeline.patient:
            self._judged.labels(model, tenant, timeline.missed or "none").inc()
            spent.judged += 1
            spent.good += not timeline.missed
            for part, goal_s, taken_s in goals_taken(timeline):
                self._slack.labels(model, tenant, part, "goal").inc(goal_s)
                self._slack.labels(model, tenant, part, "taken").inc(taken_s)

    async def refresh(self) -> None:
        """Read the remaining budgets, at most once a second."""
        now = time.monotonic()
        if now - self._seen.at < FRESH_S:
            return
        limits = dict(sorted(self._limits().items())[:MAX_TENANTS])
        self._seen = _Seen(now, await self._budgets.left(limits))
        self._limit.clear()  # a reloaded file may have fewer tenants
        self._used.clear()
        for tenant, shares in self.budgets().items():
            for budget, (used, limit) in shares.items():
                self._limit.labels(self._models.first, tenant, budget).set(limit)
                self._used.labels(self._models.first, tenant, budget).set(used)

    def _rates_now(self) -> Rates:
        """The fleet's rates, computed at most once a second: the fleet may be large."""
        now = time.monotonic()
        if now - self._rates[0] >= FRESH_S:
            self._rates = now, Rates.of(self._workers())
        return self._rates[1]

    def budgets(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Tenant -> budget -> (used, limit), as of the last `refresh`."""
        return {tenant: left.used() for tenant, left in self._seen.left.items()}

    def as_json(self) -> list[dict[str, Any]]:
        """Usage since the start and budgets, by tenant (docs/console.md)."""
        budgets = self.budgets()
        return [
            _json(name, self._spent.get(name, Spent()), budgets.get(name, {}))
            for name in sorted({*self._spent, *budgets})
        ]


def goals_taken(line: Timeline) -> Iterator[tuple[str, float, float]]:
    """Parts of an ended request's goal: name, seconds given, seconds taken. The difference is slack that nobody spent."""
    if line.ttft_ms is not None and math.isfinite(line.ttft_goal_s):
        yield "ttft", line.ttft_goal_s, line.ttft_ms / 1000
    if line.tpot_s is not None and math.isfinite(line.goal.tpot_s):
        further = line.completion_tokens - 1
        yield "tpot", further * line.goal.tpot_s, further * line.tpot_s


def _json(tenant: str, spent: Spent, budgets: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "requests": spent.requests,
        "prompt_tokens": spent.prompt_tokens,
        "cached_tokens": spent.cached_tokens,
        "completion_tokens": spent.completion_tokens,
        "judged": spent.judged,
        "good": spent.good,
        "prefill_s": round(spent.prefill_s, 3),
        "decode_s": round(spent.decode_s, 3),
        "budgets": {name: {"used": used, "limit": limit} for name, (used, limit) in budgets.items()},
    }
