"""The interface between HTTP dialects and serving: submit a specification, take tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.messages import Generate, Grammar, SamplingParams, WorkerState, features_of
from gateway.request.mailbox import Mailbox
from gateway.request.placement import Difference
from gateway.request.timeline import Timeline, Timelines
from gateway.tenants.tenants import ANYBODY, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """One sequence to generate."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    deadline_s: float  # from now
    model: str = ""  # name in the API
    model_fingerprint: str = ""  # only workers with these weights serve it; "": any
    adapter: str = ""  # applied to the weights; requests of different adapters never share KV
    salt: str = ""  # tenants with different ones never share KV
    tenant: Tenant = ANYBODY
    priority: int = 0
    first_token_s: float = 0.0  # deadline of the first token, from now; 0: the request's
    traceparent: str = ""
    received_at: float = 0.0  # `time.monotonic()` at the HTTP request's arrival; 0: unknown
    grammar: Grammar | None = None

    @property
    def num_tokens(self) -> int:
        """Maximum length of prompt and answer."""
        return len(self.token_ids) + self.sampling.max_tokens

    @property
    def features(self) -> frozenset[str]:
        """The features of the workers that may serve it: others would ignore what asks for them."""
        return features_of(Generate(sampling=self.sampling, grammar=self.grammar))


class Generation(Protocol):
    """A sequence being generated."""

    timings: dict[str, float]  # milliseconds: admission, queue, prefill, first_frame (summing to TTFT), transfer
    timeline: Timeline

    @property
    def mailbox(self) -> Mailbox:
        """Its tokens in order, without duplicates or gaps, until `finish`, or an error."""
        ...

    def cancel(self, reason: str) -> None:
        """Stop it on all workers. Idempotent."""
        ...

    def end_reasoning(self, grammar: Grammar) -> bool:
        """Continue under `grammar`, whose reasoning closes at once; False: it ended, or closed its reasoning already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A gateway's load of one model."""

    in_flight: int = 0
    waiting: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # as `Generations.waiting`
    counters: Mapping[str, int] = field(default_factory=dict)  # as `Generations.counters`


class Generations(Protocol):
    """The service that runs requests."""

    @property
    def ready(self) -> bool: ...

    @property
    def not_ready_reason(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def ready_workers(self) -> dict[str, int]:
        """Role -> workers that accept such work now."""
        ...

    @property
    def differences(self) -> Sequence[Difference]:
        """Every ready worker that gets no new work, and why."""
        ...

    @property
    def waiting(self) -> Mapping[str, tuple[int, int]]:
        """Tier -> requests and prompt tokens that wait in the gateway."""
        ...

    @property
    def fleet(self) -> list[WorkerState]:
        """Every worker that is heard, of any model and status."""
        ...

    @property
    def timelines(self) -> Timelines: ...

    @property
    def counters(self) -> Mapping[str, int]:
        """Events since the start: `placed:<reason>`, `refused:<reason>`, `work:<tenant>`, `retries`, …"""
        ...

    @property
    def loads(self) -> Mapping[str, Load]:
        """Loads by model. Figures without a model are under the first one's."""
        ...

    def turn_away(
        self, tenant: Tenant, *, priority: int, first_token_s: float = math.inf, model: str | None = None
    ) -> None:
        """Raise OverloadedError or UnavailableError if any request like this would be refused now, however short.

        `priority` is the highest that it may have, `first_token_s` the longest that it may wait. `model` None: not known
        yet.
        """
        ...

    async def submit(self, specs: Sequence[GenerationSpec]) -> Sequence[Generation]:
        """Admit and place all choices of one HTTP request, or none; return when they may start.

        Raises OverloadedError, UnavailableError or InvalidRequestError.
        """
        ...
