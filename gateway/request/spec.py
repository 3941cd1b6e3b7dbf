"""The interface between HTTP dialects and serving: submit a specification, take tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.errors import ServingError
from common.messages import (
    NO_GOAL,
    NO_KEEP,
    Generate,
    Goal,
    Grammar,
    HostedModel,
    Keep,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
    WorkerState,
    features_of,
)
from common.words import Finish
from gateway.request.placement import Difference
from gateway.request.timeline import Timeline, Timelines
from gateway.tenants.tenants import ANYBODY, Tenant


@dataclass(slots=True, kw_only=True)
class TokenEvent:
    """New tokens. `position` counts generated tokens from 0. It owns its lists."""

    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish = Finish.NONE
    cached_tokens: int = -1  # prompt tokens from a prefix cache, in the first event
    prompt_logprobs: PromptLogprobs | None = None  # first event, if asked for

    def join(self, later: TokenEvent) -> None:
        """Append the tokens."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish = later.finish

    def cut(self, count: int) -> TokenEvent:
        """Remove and return the first `count` tokens; others must remain."""
        first = replace(self, token_ids=self.token_ids[:count], logprobs=self.logprobs[:count], finish=Finish.NONE)
        self.position += count
        self.token_ids, self.logprobs = self.token_ids[count:], self.logprobs[count:]
        self.cached_tokens, self.prompt_logprobs = -1, None
        return first


class Mailbox:
    """Tokens that arrive while the reader is late are merged into one event, up to its maximum."""

    __slots__ = ("_error", "_event", "_is_closed", "_position", "_wake", "plain")

    def __init__(self) -> None:
        # Pending tokens, if there is nothing but tokens, and not the end. The reader clears it.
        self.plain: list[int] = []
        self._position = 0  # the first one's
        self._event: TokenEvent | None = None
        self._error: ServingError | None = None
        self._is_closed = False
        self._wake: Callable[[], None] = _nobody

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever something arrives, and now if something is there. It must not raise."""
        self._wake = wake
        if self.plain or self._event is not None or self._is_closed:
            wake()

    def add(self, position: int, token_id: int) -> None:
        """Add the next token, without further facts."""
        if self._event is not None:
            self._event.token_ids.append(token_id)
        else:
            if not self.plain:
                self._position = position
            self.plain.append(token_id)
        self._wake()

    def put(self, event: TokenEvent) -> None:
        """Add the next tokens."""
        self._gather()
        if self._event is None:
            self._event = event
        else:
            self._event.join(event)
        self._wake()

    def close(self, error: ServingError | None) -> None:
        """Close: no more tokens come."""
        self._gather()  # later tokens must be read after these
        self._error, self._is_closed = error, True
        self._wake()

    def take(self, at_most: int) -> TokenEvent | None:
        """Take the new tokens, or the first of them; None: none. Raises the error after the last ones."""
        self._gather()
        event = self._event
        if event is None:
            if self._error is not None:
                raise self._error
            return None
        if len(event.token_ids) > at_most:
            return event.cut(at_most)
        self._event = None
        return event

    @property
    def has_more(self) -> bool:
        """True if there is something to take: tokens, the error after them, or the end."""
        return bool(self.plain) or self._event is not None or self._is_closed

    @property
    def is_over(self) -> bool:
        """True if everything was taken, and no error is left to raise."""
        return self._is_closed and not self.plain and self._event is None and self._error is None

    def _gather(self) -> None:
        """Merge tokens that came singly into an event."""
        if self.plain:
            self._event = TokenEvent(position=self._position, token_ids=self.plain)
            self.plain = []


def _nobody() -> None:
    """No-op: nobody listens yet."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A request's tenant, W3C trace context, and time of arrival."""

    tenant: Tenant = ANYBODY
    traceparent: str = ""
    received_at: float = 0.0  # `time.monotonic()`; 0: unknown
    session: str = ""  # named by a header


@dataclass(frozen=True, slots=True)
class Sharing:
    """The request's place in the prefix cache: requests that differ in adapter or salt never share KV."""

    adapter: str = ""  # applied to the weights
    salt: str = ""  # the tenant's and the client's
    keep: Keep = NO_KEEP


@dataclass(frozen=True, slots=True)
class DraftRules:
    """The drafts that a request allows: the most tokens of a pass (-1: as workers are set), and the text that it predicts."""

    most: int = -1
    prediction: bytes = b""  # packed tokens


@dataclass(frozen=True, slots=True)
class Aim:
    """A request's goal, whether it is refused rather than late, and the deadline of its first token."""

    goal: Goal = NO_GOAL
    is_needed: bool = False
    first_token_s: float = 0.0  # from now; 0: the request's deadline


NO_AIM = Aim()


@dataclass(frozen=True, slots=True)
class Aims:
    """A gateway's goal for requests that have none, and whether it refuses who has one that can't be met."""

    usual: Goal = NO_GOAL
    refuses_late: bool = False

    def of(self, own: Goal, *, priority: int, first_token_s: float = 0.0) -> Aim:
        """The aim of a request whose client or tenant says `own`. The lowest tier has no goal."""
        if priority < 0:
            return Aim(first_token_s=first_token_s)
        needed = self.refuses_late and own.ttft_ms is not None
        return Aim(own.or_else(self.usual), is_needed=needed, first_token_s=first_token_s)


NO_AIMS = Aims()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """One sequence to generate."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    deadline_s: float  # from now
    model: str = ""  # name in the API
    model_fingerprint: str = ""  # only workers with these weights serve it; "": any
    sharing: Sharing = Sharing()
    origin: Origin = Origin()
    priority: int = 0
    grammar: Grammar | None = None
    drafts: DraftRules = DraftRules()
    aim: Aim = NO_AIM

    @property
    def goal(self) -> Goal:
        return self.aim.goal

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

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens, and those that were delivered."""
        ...

    def cancel(self, reason: str) -> None:
        """Stop it on all workers. Idempotent."""
        ...

    def called(self) -> None:
        """Tell its workers that it ended by a tool call."""
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


NOT_ALLOWED = "this key may not have model {model!r} loaded or unloaded: ask for one that is loaded, or its operator"


class Loads(Protocol):
    """The models that hosts load when they are wanted: `gateway.placement.hosts.Hosts`."""

    @property
    def heard(self) -> bool:
        """True if there is, or was, a host."""
        ...

    def find(self, model: str) -> HostedModel | None: ...

    def workers(self, model: str) -> dict[str, tuple[int, int | None]]: ...

    def must_load(self, model: str) -> bool: ...

    def is_active(self, model: str) -> bool: ...

    def left_s(self, model: str) -> float | None: ...

    def said(self, model: str) -> str: ...

    def using(self, model: str) -> AbstractContextManager[None]: ...

    async def load(self, model: str, keep_s: float | None = None) -> None: ...

    async def unload(self, model: str, *, parks: bool = False) -> bool: ...


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


def context_of(worker: WorkerState) -> int:
    """A worker's context length, which its pool holds."""
    layout = worker.region.layout
    return min(worker.max_model_len, layout.num_blocks * layout.block_size)


def longest(decode: Iterable[WorkerState]) -> int | None:
    """The longest context length of the decode workers; None without any."""
    return max(map(context_of, decode), default=None)


def cut_by_its_pool(decode: Iterable[WorkerState]) -> WorkerState | None:
    """The decode worker with the longest context, if its pool holds less than the model's; None if no pool limits it."""
    longest_of = max(decode, key=context_of, default=None)
    return longest_of if longest_of is not None and context_of(longest_of) < longest_of.whole_len else None


def usual(decode: Iterable[WorkerState]) -> int | None:
    """The context for answers without a requested length; None without a decode worker.

    The shortest one of at least half of what half of the workers have: one long context doesn't draw all such answers to its
    worker, one short context cuts none of them.
    """
    lengths = sorted(map(context_of, decode), reverse=True)
    if not lengths:
        return None
    half_have = lengths[(len(lengths) - 1) // 2]
    return min(length for length in lengths if 2 * length >= half_have)


def long_enough(workers: Iterable[WorkerState], num_tokens: int) -> list[WorkerState]:
    """Workers that accept a sequence of so many tokens."""
    return [worker for worker in workers if context_of(worker) >= num_tokens]
