"""Service-level attainment of recent requests: the heartbeat's figures that planners read.

Nothing is done per token: requests are looked at with each heartbeat and when they end. Times to first token count from the
receipt of the HTTP request. Each heartbeat samples the time per token of every running stream, so a long answer counts before its
end. The lowest tier has no service levels.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError, ServingError
from common.messages import GatewayState, Goal, ModelLevels
from gateway.request.active import ActiveRequest
from gateway.request.state import Phase
from gateway.request.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """Targets in seconds, and the window over which requests are counted."""

    ttft_s: float = 1.0  # receipt to first token
    ttft_s_per_token: float = 0.0  # added for each prompt token
    tpot_s: float = 0.05  # mean time per output token
    window_s: float = 30.0

    @property
    def goal(self) -> Goal:
        """The goal of requests whose clients and tenants say none."""
        return Goal(
            ttft_ms=1000 * self.ttft_s, ttft_ms_per_token=1000 * self.ttft_s_per_token, tpot_ms=1000 * self.tpot_s
        )


class _Window:
    """Sums over the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._buckets: deque[tuple[float, Counter[str]]] = deque()  # by starting second
        self._sums: Counter[str] = Counter()

    def add(self, name: str, amount: int, now: float) -> None:
        if not self._buckets or now - self._buckets[-1][0] >= 1.0:
            self._buckets.append((now, Counter()))
        self._buckets[-1][1][name] += amount
        self._sums[name] += amount

    def sums(self, now: float) -> Counter[str]:
        while self._buckets and now - self._buckets[0][0] > self._seconds:
            self._sums.subtract(self._buckets.popleft()[1])
        return self._sums


@dataclass(slots=True)
class _Seen:
    """The figures of a request that were counted already."""

    first_token: bool = False
    tokens: int = 0
    at: float | None = None  # time of `tokens`


class Attainment:
    """Counts for one gateway. Instants are of its monotonic clock."""

    def __init__(self, levels: ServiceLevels, *, started_at: float) -> None:
        self._levels = levels
        self._started_at = started_at
        self._windows = defaultdict[str, _Window](lambda: _Window(levels.window_s))  # by model
        self._seen: dict[str, _Seen] = {}

    def ended(self, active: ActiveRequest, error: ServingError | None, now: float) -> None:
        """Record that the request ended, failed, or its client left."""
        seen, line = self._arrived(active, now), active.timeline
        del self._seen[active.state.spec.request_id]
        self._count_first_token(active, seen, now)
        if line.first_token_at is None:
            if error is not None and not isinstance(error, InvalidRequestError) and not line.patient:
                self._windows[line.model].add("ttft", 1, now)
        elif error is None and line.completion_tokens > 1 and not line.patient:
            self._count_tokens(line, line.completion_tokens - 1, now - line.first_token_at, now)

    def state(self, gateway: str, incarnation: int, requests: Iterable[ActiveRequest], now: float) -> GatewayState:
        """Fill the heartbeat. `requests`: those in flight."""
        waiting = defaultdict[str, Counter[str]](Counter)
        seen, self._seen = self._seen, {}  # never queued
        for active in requests:
            name = active.state.spec.request_id
            if name in seen:
                self._seen[name] = seen[name]
            self._look(active, now)
            counts = waiting[active.timeline.model]
            if active.timeline.first_token_at is None and not active.timeline.patient:
                counts["late"] += now - active.timeline.received_at > active.timeline.ttft_goal_s
            if active.state.phase is Phase.QUEUED:
                counts["requests"] += 1
                counts["tokens"] += len(active.state.spec.token_ids)
            counts["handing over"] += active.state.phase is Phase.PREFILLED
        levels = {model: self._of(model, waiting[model], now) for model in {*self._windows, *waiting}}
        sums: dict[str, Any] = {
            name: sum(getattr(one, name) for one in levels.values()) for name in ModelLevels.__struct_fields__
        }
        return GatewayState(
            named=True,
            gateway=gateway,
            incarnation=incarnation,
            window_s=self._levels.window_s,
            queued_requests=sum(counts["requests"] for counts in waiting.values()),
            levels=levels,
            **sums,
        )

    def _of(self, model: str, waiting: Counter[str], now: float) -> ModelLevels:
        """The figures of one model."""
        sums = self._windows[model].sums(now)
        share = sums["prefilled tokens"] / sums["prompt tokens"] if sums["prompt tokens"] else 1.0
        seconds = max(1.0, min(self._levels.window_s, now - self._started_at))
        return ModelLevels(
            ttft_met=sums["ttft met"],
            ttft_count=sums["ttft"] + waiting["late"],
            tpot_met=sums["tpot met"],
            tpot_count=sums["tpot"],
            arriving_tokens_per_s=share * sums["arrived tokens"] / seconds,
            queued_tokens=int(share * waiting["tokens"]),
            handing_over=waiting["handing over"],
        )

    def _look(self, active: ActiveRequest, now: float) -> None:
        seen = self._arrived(active, now)
        self._count_first_token(active, seen, now)
        tokens = active.timeline.completion_tokens
        if seen.at is not None and not active.timeline.patient:
            self._count_tokens(active.timeline, tokens - seen.tokens, now - seen.at, now)
        if seen.first_token:
            seen.tokens, seen.at = tokens, now

    def _arrived(self, active: ActiveRequest, now: float) -> _Seen:
        name = active.state.spec.request_id
        if name not in self._seen:
            self._seen[name] = _Seen()
            self._windows[active.timeline.model].add("arrived tokens", active.timeline.prompt_tokens, now)
        return self._seen[name]

    def _count_first_token(self, active: ActiveRequest, seen: _Seen, now: float) -> None:
        """Count a first token once, in time or not, and its computed prompt tokens."""
        line = active.timeline
        if seen.first_token or line.first_token_at is None:
            return
        seen.first_token = True
        if not line.patient:
            self._windows[line.model].add("ttft", 1, now)
            self._windows[line.model].add("ttft met", line.first_token_at - line.received_at <= line.ttft_goal_s, now)
        handed_over = line.attempt is not None and bool(line.attempt.decode)
        self._windows[line.model].add("prompt tokens", line.prompt_tokens, now)
        self._windows[line.model].add(
            "prefilled tokens", handed_over * max(0, line.prompt_tokens - line.cached_tokens), now
        )

    def _count_tokens(self, line: Timeline, tokens: int, seconds: float, now: float) -> None:
        self._windows[line.model].add("tpot", 1, now)
        self._windows[line.model].add("tpot met", seconds <= tokens * line.goal.tpot_s, now)
