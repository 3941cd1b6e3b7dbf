"""Prometheus metrics of the gateway, under vLLM's names where one exists, so that people's dashboards go on working."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.choice import Choice, Piece
from gateway.dialect import Answer
from gateway.tenant_metrics import TenantLabels

_TTFT = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2, 2.5, 5, 10, 20, 40, 80)
_ITL = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_E2E = (0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_PHASE = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_REFUSAL = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REFUSED_WHEN = ("at once", "after waiting")
# Errors that are not the client's.
ERROR_CODES = ("worker_failed", "request_quarantined", "unavailable", "deadline_exceeded", "internal", "overloaded")


class GatewayMetrics:
    """In `registry`, by default one of its own, so that two gateways can live in one process (tests)."""

    def __init__(
        self, model: str, registry: CollectorRegistry | None = None, *, tenants: TenantLabels | None = None
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._tenants = tenants or TenantLabels()
        self._model = model
        labels = ["model_name"]
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "Request received to first token sent", _TTFT)
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Gap between two frames of a stream", _ITL)
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "Request received to last token", _E2E)
        self.phase = Histogram(
            "baton_ttft_phase_seconds",
            "Parts of the time to first token, and the transfer beside it",
            [*labels, "phase"],
            registry=self.registry,
            buckets=_PHASE,
        )
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens", labels, registry=self.registry)
        self.generation_tokens = Counter("vllm:generation_tokens", "Generated tokens", labels, registry=self.registry)
        self.cached_tokens = Counter(
            "baton_cached_prompt_tokens", "From a prefix cache", labels, registry=self.registry
        )
        self.success = Counter(
            "vllm:request_success", "Finished requests", [*labels, "finished_reason"], registry=self.registry
        )
        self.errors = Counter("baton_request_errors", "Failed requests", [*labels, "code"], registry=self.registry)
        for reason in ("stop", "length", "abort"):  # there from the start: a rate sees only what grows
            self.success.labels(model, reason)
        for code in ERROR_CODES:
            self.errors.labels(model, code)
        self.placements = Counter(
            "baton_placements",
            "Placed attempts by the reason for the choice",
            [*labels, "reason"],
            registry=self.registry,
        )
        self.events = Counter(
            "baton_gateway_events", "What went wrong on the way", [*labels, "event"], registry=self.registry
        )
        self.refusals = Counter(
            "baton_refusals",
            "Requests refused at admission, by reason",
            [*labels, "reason"],
            registry=self.registry,
        )
        self.refusal_s = Histogram(
            "baton_refusal_seconds",
            "A refused request's last byte read to its answer's last byte written, by when it was refused",
            [*labels, "when"],
            registry=self.registry,
            buckets=_REFUSAL,
        )
        for when in REFUSED_WHEN:
            self.refusal_s.labels(model, when)
        self.tenant_work = Counter(
            "baton_tenant_tokens", "Prompt and generated tokens by tenant", [*labels, "tenant"], registry=self.registry
        )
        self._by_kind = {"placed": self.placements, "refused": self.refusals, "work": self.tenant_work}
        self._rendered: dict[str, int] = {}  # of what the owner of the requests counts
        self.waiting = Gauge("vllm:num_requests_waiting", "Requests waiting here", labels, registry=self.registry)
        self.waiting_requests = Gauge(
            "baton_waiting_requests", "Requests waiting here", [*labels, "tier"], registry=self.registry
        )
        self.waiting_tokens = Gauge(
            "baton_waiting_prompt_tokens", "Prompt tokens waiting here", [*labels, "tier"], registry=self.registry
        )
        self.running = Gauge("vllm:num_requests_running", "Requests that were started", labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)

    def observe_timings(self, timings: dict[str, float]) -> None:
        """Take a generation's phases, in milliseconds."""
        for phase, milliseconds in timings.items():
            self.phase.labels(self._model, phase).observe(milliseconds / 1000)

    def first_token(self, seconds: float) -> None:
        """Take the time from the request to a choice's first token."""
        self.ttft.labels(self._model).observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Take the gap between two frames of a choice."""
        self.itl.labels(self._model).observe(seconds)

    def finished(self, *, reason: str, prompt: int, generated: int, cached: int, seconds: float) -> None:
        """Count one choice of an answer; `prompt` and `cached` are 0 but for the first choice of a prompt."""
        self.success.labels(self._model, reason).inc()
        self.prompt_tokens.labels(self._model).inc(prompt)
        self.generation_tokens.labels(self._model).inc(generated)
        self.cached_tokens.labels(self._model).inc(cached)
        self.e2e.labels(self._model).observe(seconds)

    def failed(self, code: str) -> None:
        """Count an answer that ended in an error."""
        self.errors.labels(self._model, code).inc()

    def refused(self, reason: str) -> None:
        """Count a request that a budget refused."""
        self.refusals.labels(self._model, reason).inc()

    def told_refusal(self, seconds: float, *, waited: bool) -> None:
        """A refusal was written, so long after its request had been read."""
        self.refusal_s.labels(self._model, REFUSED_WHEN[waited]).observe(seconds)

    def render(self, *, in_flight: int, counts: Mapping[str, int], waiting: Mapping[str, tuple[int, int]]) -> bytes:
        """The text of `/metrics`. `counts`: see `Generations.counters`; `waiting`: tier -> requests and prompt tokens."""
        for name, count in counts.items():
            kind, _, label = name.partition(":")
            label = self._tenants.of(label) if kind == "work" else label
            counter = self._by_kind[kind].labels(self._model, label) if label else self.events.labels(self._model, kind)
            counter.inc(count - self._rendered.get(name, 0))
            self._rendered[name] = count
        for tier, (requests, tokens) in waiting.items():
            self.waiting_requests.labels(self._model, tier).set(requests)
            self.waiting_tokens.labels(self._model, tier).set(tokens)
        num_waiting = sum(requests for requests, _ in waiting.values())
        self.waiting.labels(self._model).set(num_waiting)
        self.running.labels(self._model).set(in_flight - num_waiting)
        return generate_latest(self.registry)


class AnswerMetrics:
    """Watches one answer and counts it once, whole or streamed, however it ends."""

    def __init__(self, metrics: GatewayMetrics, answer: Answer, started: float) -> None:
        self._metrics = metrics
        self._answer = answer
        self._started = started
        self._last: dict[int, float] = {}  # choice -> time of its last token
        self._finishes: dict[int, str] = {}
        self._counted = False

    async def watch(
        self, pieces: AsyncGenerator[tuple[Choice, Piece], None]
    ) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Yield `pieces` and take their times."""
        async with aclosing(pieces):
            async for choice, piece in pieces:
                now = time.monotonic()
                if choice.index in self._last:
                    self._metrics.next_token(now - self._last[choice.index])
                else:
                    self._metrics.first_token(now - self._started)
                    choice.generation.timeline.shown(now)
                self._last[choice.index] = now
                if piece.finish:
                    self._finishes[choice.index] = piece.finish
                yield choice, piece

    def ended(self, unfinished: str = "abort") -> None:
        """Count the choices, unless that was done; those that have no reason get `unfinished`."""
        if self._counted:
            return
        self._counted = True
        seconds = time.monotonic() - self._started
        answer = self._answer
        per_prompt = answer.choices_per_prompt
        for choice in answer.choices:
            is_first = choice.index % per_prompt == 0
            self._metrics.observe_timings(choice.generation.timings)
            self._metrics.finished(
                reason=self._finishes.get(choice.index, unfinished),
                prompt=len(answer.prompts[choice.index // per_prompt]) if is_first else 0,
                generated=choice.completion_tokens,
                cached=choice.cached_tokens if is_first else 0,
                seconds=seconds,
            )

    def failed(self, code: str) -> None:
        """Count the answer as an error."""
        if not self._counted:
            self._counted = True
            self._metrics.failed(code)
