"""Prometheus metrics of the gateway, under vLLM's names where one exists, for its dashboards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    openmetrics,
)

from gateway.answers.answer import Answer
from gateway.answers.choice import Choice, Piece
from gateway.observe.instruments import Counter, Distribution, Histogram, ModelLabels
from gateway.observe.tenant_metrics import TenantLabels
from gateway.request.spec import Load

_TTFT = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2, 2.5, 5, 10, 20, 40, 80)
_ITL = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_E2E = (0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_PHASE = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_CHOICES = (1, 2, 5, 10, 20)
_REFUSAL = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REFUSED_WHEN = ("at once", "after waiting")
# Errors that are not the client's fault.
ERROR_CODES = ("worker_failed", "request_quarantined", "unavailable", "deadline_exceeded", "internal", "overloaded")


class Latencies:
    """Latencies of answers, as clients see them."""

    def __init__(self, models: ModelLabels, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=registry, buckets=buckets)

        self._models = models
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Request received to first token sent", _TTFT)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Gap between two frames of a stream", _ITL)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Request received to last token", _E2E)
        self._phase = Histogram(
            "baton_ttft_phase_seconds",
            "Parts of the time to first token, and the transfer beside it",
            ["model_name", "phase"],
            registry=registry,
            buckets=_PHASE,
        )

    def first_token(self, model: str, seconds: float) -> None:
        self.ttft.labels(self._models.of(model)).observe(seconds)

    def gaps(self, model: str) -> Distribution:
        """The observer of gaps between two frames of a model's streams."""
        return self.itl.labels(self._models.of(model))

    def last_token(self, model: str, seconds: float, phases_ms: Mapping[str, float]) -> None:
        """Observe the duration of a whole choice, and the phases of its TTFT."""
        own = self._models.of(model)
        self.e2e.labels(own).observe(seconds)
        for phase, milliseconds in phases_ms.items():
            self._phase.labels(own, phase).observe(milliseconds / 1000)


class TokenCounters:
    """Tokens of answers."""

    def __init__(self, models: ModelLabels, registry: CollectorRegistry) -> None:
        labels = ["model_name"]
        self._models = models
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens", labels, registry=registry)
        self._generated = Counter("vllm:generation_tokens", "Generated tokens", labels, registry=registry)
        self._cached = Counter("baton_cached_prompt_tokens", "From a prefix cache", labels, registry=registry)

    def add(self, model: str, *, prompt: int, generated: int, cached: int) -> None:
        own = self._models.of(model)
        self._prompt.labels(own).inc(prompt)
        self._generated.labels(own).inc(generated)
        self._cached.labels(own).inc(cached)


class Requested:
    """Requested parameters of answers, and the longest choice."""

    def __init__(self, models: ModelLabels, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[int, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=registry, buckets=buckets)

        self._models = models
        self._n = histogram("vllm:request_params_n", "Choices asked for", _CHOICES)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "Tokens asked for at most", _TOKENS)
        self._longest = histogram("vllm:request_max_num_generation_tokens", "Tokens of the longest choice", _TOKENS)

    def add(self, answer: Answer) -> None:
        model = self._models.of(answer.own_model)
        self._n.labels(model).observe(answer.choices_per_prompt)
        self._max_tokens.labels(model).observe(max([choice.max_tokens for choice in answer.choices], default=0))
        self._longest.labels(model).observe(max([choice.completion_tokens for choice in answer.choices], default=0))


class DecisionCounters:
    """Counts of the requests' owner: see `Generations.counters`."""

    def __init__(self, models: ModelLabels, registry: CollectorRegistry, tenants: TenantLabels) -> None:
        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, ["model_name", label], registry=registry)

        self._models = models
        self._tenants = tenants
        self.refusals = counter("baton_refusals", "Requests refused at admission, by reason", "reason")
        self._events = counter("baton_gateway_events", "What went wrong on the way", "event")
        self._by_kind = {
            "placed": counter("baton_placements", "Placed attempts by the reason for the choice", "reason"),
            "refused": self.refusals,
            "work": counter("baton_tenant_tokens", "Prompt and generated tokens by tenant", "tenant"),
        }
        self._shown: dict[tuple[str, str], int] = {}  # model, name -> the count at the last `show`

    def show(self, model: str, counts: Mapping[str, int]) -> None:
        """Raise the counters to `counts`, which only grow."""
        for name, count in counts.items():
            kind, _, label = name.partition(":")
            label = self._tenants.of(label) if kind == "work" else label
            own = self._models.of(model)
            counter = self._by_kind[kind].labels(own, label) if label else self._events.labels(own, kind)
            counter.inc(count - self._shown.get((model, name), 0))
            self._shown[model, name] = count


class LoadGauges:
    """Running and waiting requests."""

    def __init__(self, models: ModelLabels, registry: CollectorRegistry) -> None:
        labels = ["model_name"]
        self._models = models
        self._waiting = Gauge("vllm:num_requests_waiting", "Requests waiting here", labels, registry=registry)
        self._requests = Gauge("baton_waiting_requests", "Requests waiting here", [*labels, "tier"], registry=registry)
        self._tokens = Gauge(
            "baton_waiting_prompt_tokens", "Prompt tokens waiting here", [*labels, "tier"], registry=registry
        )
        self._running = Gauge("vllm:num_requests_running", "Requests that were started", labels, registry=registry)

    def show(self, model: str, load: Load) -> None:
        for tier, (requests, tokens) in load.waiting.items():
            self._requests.labels(self._models.of(model), tier).set(requests)
            self._tokens.labels(self._models.of(model), tier).set(tokens)
        num_waiting = sum(requests for requests, _ in load.waiting.values())
        self._waiting.labels(self._models.of(model)).set(num_waiting)
        self._running.labels(self._models.of(model)).set(load.in_flight - num_waiting)


class GatewayMetrics:
    """Metrics in `registry`, by default a private one: tests run two gateways in one process."""

    def __init__(
        self, models: Sequence[str], registry: CollectorRegistry | None = None, *, tenants: TenantLabels | None = None
    ) -> None:
        disable_created_metrics()  # they double the series without use to Prometheus
        self.registry = registry or CollectorRegistry()
        self._models = names = ModelLabels(models)
        self.latencies = Latencies(names, self.registry)
        self.tokens = TokenCounters(names, self.registry)
        self.requested = Requested(names, self.registry)
        self._success = Counter(
            "vllm:request_success", "Finished requests", ["model_name", "finished_reason"], registry=self.registry
        )
        self._errors = Counter(
            "baton_request_errors", "Failed requests", ["model_name", "code"], registry=self.registry
        )
        self._asked = Counter(
            "baton_dialect_requests", "Requests by dialect and path", ["dialect", "path"], registry=self.registry
        )
        self._shared = Counter(
            "baton_alias_requests",
            "Answers to names that several models share, by the one that gave it",
            ["alias", "model_name"],
            registry=self.registry,
        )
        self._decisions = DecisionCounters(names, self.registry, tenants or TenantLabels())
        self._refusal_s = Histogram(
            "baton_refusal_seconds",
            "A refused request's last byte read to its answer's last byte written, by when it was refused",
            ["model_name", "when"],
            registry=self.registry,
            buckets=_REFUSAL,
        )
        self._load = LoadGauges(names, self.registry)
        ProcessCollector(registry=self.registry)
        for model in names.names:  # a rate needs an initial sample
            for reason in ("stop", "length", "abort"):
                self._success.labels(model, reason)
            for code in ERROR_CODES:
                self._errors.labels(model, code)
        for when in REFUSED_WHEN:
            self._refusal_s.labels(names.first, when)

    def asked(self, dialect: str, path: str) -> None:
        """Count a request to a dialect's path, labelled with its parameters' names."""
        self._asked.labels(dialect, path).inc()

    def shared(self, alias: str, model: str) -> None:
        """Count an answer to an alias that several models share."""
        self._shared.labels(alias, self._models.of(model)).inc()

    def finished(self, model: str, reason: str) -> None:
        self._success.labels(self._models.of(model), reason).inc()

    def failed(self, code: str, *, model: str = "") -> None:
        """Count an answer that ended in an error; no `model`: unknown yet."""
        self._errors.labels(self._models.of(model), code).inc()

    def refused(self, reason: str, *, model: str = "") -> None:
        self._decisions.refusals.labels(self._models.of(model), reason).inc()

    def told_refusal(self, seconds: float, *, waited: bool) -> None:
        """Observe a refusal that was written `seconds` after its request was read."""
        self._refusal_s.labels(self._models.first, REFUSED_WHEN[waited]).observe(seconds)

    def render(self, loads: Mapping[str, Load], *, as_open_metrics: bool = False) -> bytes:
        """The text of `/metrics`. `loads`: see `Generations.loads`."""
        for model, load in loads.items():
            self._decisions.show(model, load.counters)
            self._load.show(model, load)
        if as_open_metrics:  # the default of `escaping` would drop the colon from names
            return openmetrics.exposition.generate_latest(self.registry, openmetrics.exposition.ALLOWUTF8)
        return generate_latest(self.registry)


class AnswerMetrics:
    """Counts an answer once, whole or streamed, however it ends."""

    __slots__ = ("_answer", "_counted", "_finishes", "_gaps", "_metrics", "_started", "_unsent")

    def __init__(self, metrics: GatewayMetrics, answer: Answer, started: float) -> None:
        self._metrics = metrics
        self._answer = answer
        self._started = started
        self._gaps = metrics.latencies.gaps(answer.own_model)
        self._unsent: Choice | None = None  # a choice whose first text is being sent
        self._finishes: dict[int, str] = {}
        self._counted = False

    def took(self, choice: Choice, piece: Piece) -> None:
        now = time.monotonic()
        if choice.told_at is not None:
            self._gaps.observe(now - choice.told_at)
        else:
            self._metrics.latencies.first_token(self._answer.own_model, now - self._started)
            choice.generation.timeline.shown(now)
        choice.told_at = now
        self._unsent = None if choice.is_sent else choice
        if piece.finish:
            self._finishes[choice.index] = piece.finish

    def went_on(self, choice: Choice) -> None:
        now = time.monotonic()
        self._gaps.observe(now - (choice.told_at or now))
        choice.told_at = now
        if not choice.is_sent:
            self._unsent = choice

    def sending(self) -> None:
        """Note that a stream's bytes go to the server now, with the latest piece if there is one."""
        if self._unsent is not None:
            self._unsent.generation.timeline.shown(time.monotonic(), sent=True)
            self._unsent.is_sent = True
            self._unsent = None

    def ended(self) -> None:
        """Count the choices once. Unfinished ones were aborted."""
        if self._counted:
            return
        self._counted = True
        seconds = time.monotonic() - self._started
        answer = self._answer
        per_prompt = answer.choices_per_prompt
        self._metrics.requested.add(answer)
        for choice in answer.choices:
            is_first = choice.index % per_prompt == 0
            self._metrics.finished(answer.own_model, self._finishes.get(choice.index, "abort"))
            self._metrics.latencies.last_token(answer.own_model, seconds, choice.generation.timings)
            self._metrics.tokens.add(
                answer.own_model,
                prompt=len(answer.prompts[choice.index // per_prompt]) if is_first else 0,
                generated=choice.completion_tokens,
                cached=choice.cached_tokens if is_first else 0,
            )

    def failed(self, code: str) -> None:
        if not self._counted:
            self._counted = True
            self._metrics.failed(code, model=self._answer.own_model)
