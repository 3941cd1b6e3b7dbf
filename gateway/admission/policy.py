"""Which requests start now, which wait, and which are refused. No I/O, no clock.

The *window* is the work that was started and has no first token yet: enough to keep the workers busy for `window_s`, so that the
order of the waiting requests (`gateway.admission.queue`) still matters. A request is refused when the queue is full, or as soon
as the measured rates say that its first token would be late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from common.errors import OverloadedError
from common.messages import WorkerState
from gateway.admission.queue import HIGH, TIERS, Ticket, TieredQueue

MAX_RETRY_AFTER_S = 60.0
WINDOW_REQUESTS = 64  # per worker; bounds the window where prompts are very short
SHORT_PROMPT_S = 0.5  # an idle decode worker may start prompts this short outside the window
UNMEASURED_LOCAL_SHARE = 0.25  # unmeasured local rate of a decode worker, per prefill rate
ADMISSION_HEADROOM = 0.2  # admit only if 1.2 times the predicted wait still meets the deadline
GENERATED_TOKEN_WORK = 2.0  # a generated token's work for its tenant, in prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds of what one gateway takes on."""

    max_requests: int = 1024  # requests in flight, waiting ones included
    max_queued_tokens: int = 4_000_000  # prompt tokens without a first token
    cut_over_tokens: int = -1  # see `PlacementRequest`
    window_s: float = 1.0  # work at the workers, in seconds of their prefill rates
    reserved: float = 0.1  # share of window and queue for the highest tier alone


class RefusedError(OverloadedError):
    """A request has to come back later. `reason` is a word to count by."""

    def __init__(self, reason: str, message: str, retry_after_s: float) -> None:
        super().__init__(f"{message}; try again later", retry_after_s=min(MAX_RETRY_AFTER_S, max(1.0, retry_after_s)))
        self.reason = reason
        self.waited = False  # refused after waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefiller:
    """A worker that computes prompts."""

    tokens_per_s: float = 0.0  # 0 = not measured
    queued_tokens: int = 0  # tokens ahead of a new prompt
    fixed_s: float = 0.0  # overhead of each pass
    decodes: bool = False  # it also decodes


@dataclass(kw_only=True)
class Capacity:
    """The fleet as a gateway sees it. Nothing is predicted until a worker has measured its rate.

    `unplaced_tokens` and `passed` may grow as requests start, until the fleet is looked at again.
    """

    workers: tuple[Prefiller, ...]
    gateways: int = 1  # alive, this one included
    unplaced_tokens: int = 0  # started anywhere, and in no worker's `queued_tokens`
    started_elsewhere: int = 0  # prompt tokens in the windows of other gateways
    waiting_elsewhere: int = 0  # prompt tokens that wait at other gateways
    passed: int = 0  # short prompts started outside the window

    @cached_property
    def tokens_per_s(self) -> float:
        return sum(worker.tokens_per_s for worker in self.workers)

    @cached_property
    def _free(self) -> list[tuple[float, float]]:
        """(seconds until a worker is free, its rate), the first to be free first."""
        return sorted((w.queued_tokens / w.tokens_per_s, w.tokens_per_s) for w in self.workers)

    def wait_s(self, ahead: float) -> float:
        """Seconds until `ahead` more prompt tokens are dealt out, each to a free worker, and a worker is free."""
        if not self.tokens_per_s:
            return 0.0
        rate, level, left = 0.0, 0.0, ahead
        for free_at, worker_rate in self._free:
            if rate and left < (free_at - level) * rate:
                break
            left -= (free_at - level) * rate
            rate, level = rate + worker_rate, free_at
        return level + left / rate

    def first_token_s(self, ahead: float, work: int) -> float:
        """Seconds until the first token of a prompt of `work` tokens behind `ahead` tokens; 0 while unmeasured."""
        if not self.tokens_per_s:
            return 0.0
        level = self.wait_s(ahead)
        return min(
            max(level, worker.queued_tokens / worker.tokens_per_s) + worker.fixed_s + work / worker.tokens_per_s
            for worker in self.workers
        )

    def computing_s(self, work: int) -> float:
        """Seconds that the fastest worker computes a prompt, without any wait."""
        return min((one.fixed_s + work / one.tokens_per_s for one in self.workers if one.tokens_per_s), default=0.0)

    def fastest_s(self, work: int) -> float:
        """A cheap upper bound of `first_token_s`: the fastest worker takes the prompt next."""
        offset_s, rate = self._fastest
        return offset_s + work / rate if rate else 0.0

    @cached_property
    def _fastest(self) -> tuple[float, float]:
        if not self.tokens_per_s:
            return 0.0, 0.0
        worker = max(self.workers, key=lambda one: one.tokens_per_s)
        return worker.queued_tokens / worker.tokens_per_s + worker.fixed_s, worker.tokens_per_s

    @cached_property
    def _beside(self) -> list[Prefiller]:
        """Decode workers without queued prompts, the fastest first."""
        idle = (
            worker for worker in self.workers if worker.decodes and not worker.queued_tokens and worker.tokens_per_s
        )
        return sorted(idle, key=lambda worker: -worker.tokens_per_s)

    @property
    def short(self) -> float:
        """The longest prompt that an idle decode worker computes within `SHORT_PROMPT_S`; 0 if none is idle."""
        return SHORT_PROMPT_S * self._beside[self.passed].tokens_per_s if self.passed < len(self._beside) else 0.0

    def window(self, seconds: float) -> float:
        """This gateway's window in prompt tokens: its equal part, or more if other gateways use less."""
        if not self.tokens_per_s:
            return math.inf
        size = self.tokens_per_s * seconds
        return max(size / self.gateways, size - self.started_elsewhere)


def prefillers(
    prefill: Iterable[WorkerState], decode: Iterable[WorkerState], *, local: bool, queued: Mapping[str, int]
) -> tuple[Prefiller, ...]:
    """The workers that compute prompts. One without a measured rate counts as the slowest of the others.

    `local`: decode workers compute prompts, too, as they do when nobody else prefills. `queued`: worker -> prompt tokens
    waiting there.
    """
    rates = {state.worker: (state.prefill_tokens_per_s, state) for state in prefill}
    beside, alone = set[str](), not rates
    if local or alone:
        for state in decode:
            share = 1.0 if alone else UNMEASURED_LOCAL_SHARE
            rate = state.local_tokens_per_s or share * state.prefill_tokens_per_s
            if (alone or rate) and state.worker not in rates:
                rates[state.worker] = rate, state
                beside.add(state.worker)
    slowest = min((rate for rate, _ in rates.values() if rate > 0), default=0.0)
    return tuple(
        Prefiller(
            tokens_per_s=rate or slowest,
            queued_tokens=queued.get(state.worker, 0),
            fixed_s=state.prefill_fixed_ms / 1000,
            decodes=state.worker in beside,
        )
        for rate, state in rates.values()
    )


@dataclass(slots=True)
class _Part:
    """A started choice."""

    ticket: Ticket
    work: int
    most: float  # one worker's part of the window
    computing: bool = True  # no first token yet, so it is in the window

    @property
    def fill(self) -> float:
        """Its part of the window: a long prompt keeps only one worker busy."""
        return min(self.work, self.most)


class Admission:
    """Decides, and counts what waits and what was started."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.queue = TieredQueue()
        self._parts: dict[str, _Part] = {}
        self._requests = [0 for _ in TIERS]  # choices in flight, waiting or started
        self._window_requests = [0 for _ in TIERS]
        self._window_work = [0 for _ in TIERS]
        self._window_fill = [0.0 for _ in TIERS]

    @property
    def in_flight(self) -> int:
        return sum(self._requests)

    @property
    def window_work(self) -> int:
        """Prompt tokens started without a first token."""
        return sum(self._window_work)

    @property
    def window_fill(self) -> int:
        """The same, with each prompt bounded by what one worker computes in the window's time."""
        return math.ceil(sum(self._window_fill))

    # -- coming in ---------------------------------------------------------------------------------------------------

    def offer(self, ticket: Ticket, capacity: Capacity, now: float) -> None:
        """Let a request wait. Raises RefusedError."""
        self.check(ticket, capacity, now)
        self.queue.push(ticket)
        self._requests[ticket.tier] += ticket.requests

    def check(self, ticket: Ticket, capacity: Capacity, now: float) -> None:
        """Raise RefusedError if the ticket may not wait. If a ticket passes, one of less work does, too."""
        refusal = self._full(ticket, capacity) or self._too_late(ticket, capacity, now, spare=ADMISSION_HEADROOM)
        if refusal is not None:
            raise refusal

    def would_start(self, ticket: Ticket, capacity: Capacity, now: float) -> bool:
        """Whether a request would be admitted, and be the first to start."""
        if self.queue or not self._has_room(ticket.tier, capacity):
            return False
        return (
            self._full(ticket, capacity) is None
            and self._too_late(ticket, capacity, now, spare=ADMISSION_HEADROOM) is None
        )

    def _full(self, ticket: Ticket, capacity: Capacity) -> RefusedError | None:
        limits, share = self.limits, 1.0 if ticket.tier == HIGH else 1.0 - self.limits.reserved
        lower = slice(None) if ticket.tier == HIGH else slice(HIGH)
        allowed = limits.max_requests if ticket.tier == HIGH else math.ceil(limits.max_requests * share)
        present = max(
            self.in_flight + ticket.requests - limits.max_requests,
            sum(self._requests[lower]) + ticket.requests - allowed,
        )
        if present > 0:
            return RefusedError(
                "requests", f"{self.in_flight} requests are in flight, the limit", self._drained_s(capacity) / 2
            )
        waiting = self.queue.work + self.window_work
        lower_waiting = sum(queue.work for queue in self.queue.tiers[lower]) + sum(self._window_work[lower])
        excess = max(
            waiting + ticket.work - limits.max_queued_tokens,
            lower_waiting + ticket.work - limits.max_queued_tokens * share,
        )
        if waiting and excess > 0:
            wait_s = excess / capacity.tokens_per_s if capacity.tokens_per_s else 1.0
            return RefusedError(
                "tokens", f"{waiting} prompt tokens wait, the limit is {limits.max_queued_tokens}", wait_s
            )
        return self._beyond_share(ticket, capacity)

    def _beyond_share(self, ticket: Ticket, capacity: Capacity) -> RefusedError | None:
        """One tenant must not fill the queue."""
        requests, work = self.queue.requests_of.get(ticket.tenant, 0), self.queue.work_of.get(ticket.tenant, 0)
        if requests and (
            requests + ticket.requests > ticket.share * self.limits.max_requests
            or work + ticket.work > ticket.share * self.limits.max_queued_tokens
        ):
            message = f"{requests} requests with {work} prompt tokens of this tenant wait, its share of the queue"
            return RefusedError("share", message, self._drained_s(capacity) / 2)
        return None

    def _drained_s(self, capacity: Capacity) -> float:
        """Seconds until all that waits here is dealt out."""
        return capacity.wait_s(capacity.unplaced_tokens + self.queue.work)

    def _too_late(self, ticket: Ticket, capacity: Capacity, now: float, *, spare: float = 0.0) -> RefusedError | None:
        """`spare`: the share of the predicted wait that must be left besides."""
        left_s = ticket.first_token_by - now
        before = self.queue.work_before(ticket)
        elsewhere = min(capacity.waiting_elsewhere, before * (capacity.gateways - 1))
        needs_s = capacity.first_token_s(capacity.unplaced_tokens + before + elsewhere, ticket.work)
        if ticket.work <= capacity.short:
            needs_s = min(needs_s, SHORT_PROMPT_S)
        if needs_s * (1 + spare) <= left_s:
            return None
        spare_s = spare * (needs_s - capacity.computing_s(ticket.work))
        if needs_s + spare_s <= left_s:
            return None
        alone_s = capacity.first_token_s(0, ticket.work)
        message = f"the first token would come in {needs_s:.1f} s, the request's deadline is in {left_s:.1f} s"
        again_s = needs_s + spare_s - left_s if alone_s < left_s else MAX_RETRY_AFTER_S
        return RefusedError("deadline", message, again_s)

    def late(self, capacity: Capacity, now: float) -> list[tuple[Ticket, RefusedError]]:
        """Take out the waiting requests that would be late, and say why."""
        if not self.queue:
            return []
        total = capacity.unplaced_tokens + capacity.waiting_elsewhere + self.queue.work
        slowest_s = capacity.wait_s(total)
        found = []
        for ticket in list(self.queue):
            if now + slowest_s + capacity.fastest_s(ticket.work) <= ticket.first_token_by:
                continue  # most are in time even if they start last
            refusal = self._too_late(ticket, capacity, now)
            if refusal is not None:
                self.withdraw(ticket)
                found.append((ticket, refusal))
        return found

    # -- starting ----------------------------------------------------------------------------------------------------

    def next(self, capacity: Capacity) -> Ticket | None:
        """The request that starts now, if there is room."""
        for tier in self.queue.order():
            if self._has_room(tier, capacity):
                ticket = self.queue.pop(tier)
                self._start(ticket, self._most(capacity))
                return ticket
        if capacity.short:
            for tier in reversed(range(len(TIERS))):
                short = self.queue.pop_short(tier, capacity.short)
                if short is not None:
                    capacity.passed += 1
                    self._start(short, self._most(capacity))
                    return short
        return None

    def _most(self, capacity: Capacity) -> float:
        """The most that one prompt takes of the window: a worker's part, in tokens."""
        return capacity.tokens_per_s * self.limits.window_s / len(capacity.workers) or math.inf

    def _has_room(self, tier: int, capacity: Capacity) -> bool:
        """Whether the window has room or some worker nothing to do. One request may overrun it."""
        if not capacity.workers:
            return False
        tokens, requests = capacity.window(self.limits.window_s), WINDOW_REQUESTS * len(capacity.workers)
        in_all = sum(self._window_fill), sum(self._window_requests)
        is_open = in_all[1] < len(capacity.workers) or (in_all[0] < tokens and in_all[1] < requests)
        reserved = self.limits.reserved
        if tier == HIGH:
            own = self._window_fill[HIGH], self._window_requests[HIGH]
            return is_open or (own[0] < reserved * tokens and own[1] < reserved * requests)
        lower = sum(self._window_fill[:HIGH]), sum(self._window_requests[:HIGH])
        least = max(1, math.floor((1 - reserved) * len(capacity.workers)))
        return is_open and (
            lower[1] < least or (lower[0] < (1 - reserved) * tokens and lower[1] < (1 - reserved) * requests)
        )

    def _start(self, ticket: Ticket, most: float) -> None:
        ticket.started = True
        for request_id, work in zip(ticket.ids, ticket.works, strict=True):
            part = self._parts[request_id] = _Part(ticket, work, most)
            self._window_requests[ticket.tier] += 1
            self._window_work[ticket.tier] += work
            self._window_fill[ticket.tier] += part.fill

    # -- what becomes of it ------------------------------------------------------------------------------------------

    def withdraw(self, ticket: Ticket) -> None:
        """The client left, or the request was refused. Idempotent."""
        if self.queue.remove(ticket):
            self._requests[ticket.tier] -= ticket.requests
        for request_id in ticket.ids:
            self.ended(request_id)

    def placed(self, request_id: str, work: int) -> None:
        """The worker is chosen, and its cached prefix known: this much is left to compute."""
        part = self._parts.get(request_id)
        if part is not None and part.computing:
            tier = part.ticket.tier
            self._window_work[tier] += work - part.work
            self._window_fill[tier] -= part.fill
            self.queue.tiers[tier].charge(part.ticket.tenant, work - part.work)
            part.work = work
            self._window_fill[tier] += part.fill

    def computed(self, request_id: str) -> None:
        """A first token came. Idempotent."""
        part = self._parts.get(request_id)
        if part is not None and part.computing:
            part.computing = False
            self._window_requests[part.ticket.tier] -= 1
            self._window_work[part.ticket.tier] -= part.work
            self._window_fill[part.ticket.tier] -= part.fill
            if not any(self._window_requests):
                self._window_fill = [0.0 for _ in TIERS]  # sums of floats drift from 0

    def ended(self, request_id: str, generated: int = 0) -> None:
        """A started choice is over. Idempotent."""
        self.computed(request_id)
        part = self._parts.pop(request_id, None)
        if part is not None:
            self._requests[part.ticket.tier] -= 1
            self.queue.tiers[part.ticket.tier].charge(part.ticket.tenant, GENERATED_TOKEN_WORK * generated)
