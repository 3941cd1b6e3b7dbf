"""What the HTTP dialects see of serving: submit a specification, iterate over token events."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.messages import SamplingParams, TokenLogprobs, WorkerState
from gateway.tenants import ANYBODY, Tenant
from gateway.timeline import Timeline, Timelines


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """One sequence to generate."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    deadline_s: float  # from now
    salt: str = ""  # tenants that set one never share KV
    tenant: Tenant = ANYBODY
    priority: int = 0
    first_token_s: float = 0.0  # from now, the latest first token that is of use; 0 = the deadline
    traceparent: str = ""
    received_at: float = 0.0  # when the HTTP request came in, `time.monotonic()`; 0 = not known


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New tokens. `position` counts generated tokens from 0."""

    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str = ""  # "", "stop", "length"
    cached_tokens: int = -1  # with the first event: prompt tokens that came from a prefix cache


class Generation(Protocol):
    """A sequence being generated."""

    timings: dict[
        str, float
    ]  # milliseconds: admission, queue, prefill, first_frame (which make the first token), transfer
    timeline: Timeline

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Events in order, no token twice, none missing; ends after the event with `finish`. Raises ServingError."""
        ...

    async def cancel(self, reason: str) -> None:
        """Stop it on all workers. Idempotent; does nothing after the end."""
        ...


class Generations(Protocol):
    """Where requests go."""

    @property
    def max_model_len(self) -> int | None: ...

    @property
    def ready(self) -> bool: ...

    @property
    def not_ready_reason(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def ready_workers(self) -> dict[str, int]:
        """Role -> workers that may get work of it now."""
        ...

    @property
    def waiting(self) -> Mapping[str, tuple[int, int]]:
        """Tier -> requests and prompt tokens that wait in the gateway."""
        ...

    @property
    def fleet(self) -> list[WorkerState]:
        """Every worker that is heard, of whatever model and status."""
        ...

    @property
    def timelines(self) -> Timelines:
        """Where the time of recent requests went."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened so often since the start: `placed:<reason>`, `refused:<reason>`, `work:<tenant>`, `retries`, …"""
        ...

    def turn_away(self, tenant: Tenant, *, priority: int, first_token_s: float = math.inf) -> None:
        """Raise OverloadedError or UnavailableError if any request like this would be refused now, however short its prompt.

        `priority` is the highest that it may have; `first_token_s` the longest that it can wait.
        """
        ...

    async def submit(self, specs: Sequence[GenerationSpec]) -> Sequence[Generation]:
        """Admit and place the choices of one HTTP request, all of them or none; return when they may start.

        Raises OverloadedError, UnavailableError or InvalidRequestError.
        """
        ...
