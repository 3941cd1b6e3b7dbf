"""The admission policy: which requests start now, wait, or are refused. No I/O, no clock.

The *window* is the work that was started and has no first token yet: enough to keep the workers busy for `window_s`, so that the
order of the waiting requests (`gateway.admission.queue`) still matters. A request is refused when the queue is full, or as soon
as the measured rates say that its first token would be late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import OverloadedError
from gateway.admission.queue import HIGH, TIERS, Share, Ticket, TieredQueue
from gateway.admission.supply import SHORT_PROMPT_S, Capacity, Held, Newcomer

MAX_RETRY_AFTER_S = 60.0
WINDOW_REQUESTS = 64  # per worker; bounds the window where prompts are very short
ADMISSION_HEADROOM = 0.2  # admit only if 1.2 times the predicted wait still meets the deadline
AGEING = 4.0  # as `decode.pacing` counts a prompt's computing time
# Part of the overtaken work that is no wait: shorter prompts than this one come later.
OVERTAKING = 0.7
GENERATED_TOKEN_WORK = 2.0  # weight of a generated token, in prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one gateway's load."""

    max_requests: int = 1024  # requests in flight, waiting ones included
    max_queued_tokens: int = 4_000_000  # prompt tokens without a first token
    cut_over_tokens: int = -1  # see `PlacementRequest`
    window_s: float = 1.0  # work at the workers, in seconds of their prefill rates
    reserved: float = 0.1  # share of window and queue for the highest tier alone


class RefusedError(OverloadedError):
    """The request must come back later. `reason` is a label for metrics."""

    def __init__(self, reason: str, message: str, retry_after_s: float, *, param: str | None = None) -> None:
        """`param`: the request's field that it is refused by."""
        bounded_s = min(MAX_RETRY_AFTER_S, max(1.0, retry_after_s))
        super().__init__(f"{message}; try again later", retry_after_s=bounded_s, param=param)
        self.reason = reason
        self.waited = False  # refused after waiting


@dataclass(slots=True)
class _Part:
    """A started choice."""

    ticket: Ticket
    work: int
    most: float  # one worker's part of the window
    computing: bool = True  # no first token yet, so it is in the window

    @property
    def fill(self) -> float:
        """Its share of the window: a long prompt keeps only one worker busy."""
        return min(self.work, self.most)


class Admission:
    """The policy's state: decides, and counts waiting and started work."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.queue = TieredQueue()
        self._parts: dict[str, _Part] = {}
        self._requests = [0 for _ in TIERS]  # choices in flight, waiting or started
        self._window_requests = [0 for _ in TIERS]
        self._window_work = [0 for _ in TIERS]
        self._window_fill = [0.0 for _ in TIERS]
        self.held = Held()

    @property
    def in_flight(self) -> int:
        return sum(self._requests)

    @property
    def window_work(self) -> int:
        """Prompt tokens started without a first token."""
        return sum(self._window_work)

    @property
    def window_fill(self) -> int:
        """`window_work` with each prompt capped by what one worker computes in the window's time."""
        return math.ceil(sum(self._window_fill))

    # -- coming in ---------------------------------------------------------------------------------------------------

    def offer(self, ticket: Ticket, capacity: Capacity, now: float) -> None:
        """Enqueue a request. Raises RefusedError."""
        self.check(ticket, capacity, now)
        self.queue.push(ticket)
        self._requests[ticket.tier] += ticket.requests

    def check(self, ticket: Ticket, capacity: Capacity, now: float) -> None:
        """Raise RefusedError if the ticket may not wait. If a ticket passes, any with less work does, too."""
        refusal = self._refusal(ticket, capacity, now)
        if refusal is not None:
            raise refusal

    def _refusal(self, ticket: Ticket, capacity: Capacity, now: float) -> RefusedError | None:
        refusal = None if self._has_plenty(ticket) else self._full(ticket, capacity)
        return refusal or self._too_late(ticket, capacity, now, spare=ADMISSION_HEADROOM)

    def _has_plenty(self, ticket: Ticket) -> bool:
        """True if nobody waits, and even the lower tiers' limits leave room: `_full` can be skipped."""
        limits, share = self.limits, 1.0 - self.limits.reserved
        return (
            not self.queue
            and self.in_flight + ticket.requests <= limits.max_requests * share
            and self.window_work + ticket.work <= limits.max_queued_tokens * share
        )

    def would_start(self, ticket: Ticket, capacity: Capacity, now: float) -> bool:
        """True if a request would be admitted and started first."""
        if self.queue or not self._has_room(ticket.tier, capacity) or not self._has_place(capacity):
            return False
        return self._refusal(ticket, capacity, now) is None

    def start_at_once(self, ticket: Ticket, capacity: Capacity) -> None:
        """Admit and start a request for which `would_start` is true."""
        self.queue.push(ticket)
        self._requests[ticket.tier] += ticket.requests
        self.start(ticket, capacity)

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
        """Check that one tenant does not fill the queue."""
        requests, work = self.queue.requests_of.get(ticket.tenant, 0), self.queue.work_of.get(ticket.tenant, 0)
        if requests and (
            requests + ticket.requests > ticket.share * self.limits.max_requests
            or work + ticket.work > ticket.share * self.limits.max_queued_tokens
        ):
            message = f"{requests} requests with {work} prompt tokens of this tenant wait, its share of the queue"
            return RefusedError("share", message, self._drained_s(capacity) / 2)
        return None

    def _drained_s(self, capacity: Capacity) -> float:
        """Seconds until the whole queue is dispatched."""
        return capacity.wait_s(capacity.unplaced_tokens + self.queue.work)

    def _too_late(self, ticket: Ticket, capacity: Capacity, now: float, *, spare: float = 0.0) -> RefusedError | None:
        """`spare`: the share of the predicted wait required as headroom."""
        left_s = ticket.first_token_by - now
        if left_s == ticket.begin_by == math.inf:
            return None
        before = self.queue.work_before(ticket) if self.queue else 0.0
        elsewhere = min(capacity.waiting_elsewhere, before * (capacity.gateways - 1))
        needs_s = capacity.first_token_s(capacity.unplaced_tokens + before + elsewhere, ticket.work)
        if ticket.work <= capacity.short:
            needs_s = min(needs_s, SHORT_PROMPT_S)
        place_s = self._place_s(ticket, capacity) if spare else 0.0  # too rough to refuse a waiting request
        if (missed := self._goal_missed(ticket, needs_s, place_s, capacity, now)) is not None:
            return missed
        needs_s += place_s
        if needs_s * (1 + spare) <= left_s:
            return None
        spare_s = spare * (needs_s - capacity.computing_s(ticket.work))
        if needs_s + spare_s <= left_s:
            return None
        alone_s = capacity.first_token_s(0, ticket.work)
        message = f"the first token would come in {needs_s:.1f} s, the request's deadline is in {left_s:.1f} s"
        again_s = needs_s + spare_s - left_s if alone_s < left_s else MAX_RETRY_AFTER_S
        return RefusedError("deadline", message, again_s)

    def _goal_missed(
        self, ticket: Ticket, needs_s: float, place_s: float, capacity: Capacity, now: float
    ) -> RefusedError | None:
        """The refusal of a ticket whose goal can't be met, if it is refused by its goal.

        A goal's part per token is for the prompt's own computing. Otherwise long prompts could wait longest, and would be all
        that an overloaded gateway admits.
        """
        if ticket.begin_by == math.inf:
            return None
        # The goal is the first prompt's: further ones of the request begin beside it or behind it.
        computing_s = capacity.computing_s(ticket.works[0])
        before_s = needs_s - capacity.computing_s(ticket.work)
        waits_s = place_s + before_s * (1 - OVERTAKING * self._overtaken(ticket, capacity))
        beyond_s = now + waits_s - min(ticket.begin_by, ticket.good_by - computing_s)
        if beyond_s <= 0:
            return None
        told = f"the first token would come in {waits_s + computing_s:.2f} s, {beyond_s:.2f} s too late for its goal"
        is_hopeless = now + computing_s > ticket.good_by
        return RefusedError("goal", told, MAX_RETRY_AFTER_S if is_hopeless else beyond_s, param="ttft_slo_ms")

    def _overtaken(self, ticket: Ticket, capacity: Capacity) -> float:
        """The share of the prompt tokens at the workers behind which the ticket doesn't wait, as theirs are the later turns."""
        if not capacity.takes_turns or not self.window_work:
            return 0.0
        token_s = AGEING / capacity.tokens_per_s
        turn = ticket.arrived_at + token_s * ticket.work
        parts = (part for part in self._parts.values() if part.computing)
        overtaken = sum(part.work for part in parts if part.ticket.arrived_at + token_s * part.work > turn)
        return min(1.0, overtaken / max(1, capacity.queued_tokens))

    def _place_s(self, ticket: Ticket, capacity: Capacity) -> float:
        """Seconds until the tenant's next request gets a slot; 0 if preemption frees one, or while unmeasured."""
        places, held = capacity.places, self.held
        before = self.queue.requests_of.get(ticket.tenant, 0)
        if places.free(held, 0) > before:
            return 0.0
        claim = Newcomer(tenant=ticket.tenant, weight=ticket.weight, tier=ticket.tier)
        if places.is_owed(claim, held):
            return 0.0
        return places.mean_s * (before + 1) / places.part(ticket.tenant, ticket.weight, held)

    def late(self, capacity: Capacity, now: float) -> list[tuple[Ticket, RefusedError]]:
        """Remove the waiting requests that would be late, with the reason."""
        if not self.queue:
            return []
        total = capacity.unplaced_tokens + capacity.waiting_elsewhere + self.queue.work
        slowest_s = capacity.wait_s(total)
        found = []
        for ticket in list(self.queue):
            if ticket.resumes:
                continue
            latest = now + slowest_s + capacity.fastest_s(ticket.work)
            if latest <= min(ticket.first_token_by, ticket.good_by) and now + slowest_s <= ticket.begin_by:
                continue  # most are in time even if they start last
            refusal = self._too_late(ticket, capacity, now)
            if refusal is not None:
                self.withdraw(ticket)
                found.append((ticket, refusal))
        return found

    # -- starting ----------------------------------------------------------------------------------------------------

    def next(self, capacity: Capacity) -> Ticket | None:
        """The next request to start, if there is room."""
        if not self._has_place(capacity):
            return None
        for ticket in self.heads(capacity):
            self.start(ticket, capacity)
            return ticket
        if capacity.short:
            for tier in reversed(range(len(TIERS))):
                short = self.queue.pop_short(tier, capacity.short, self._share(capacity))
                if short is not None:
                    capacity.passed += 1
                    self._start(short, self._most(capacity))
                    return short
        return None

    def heads(self, capacity: Capacity) -> Iterator[Ticket]:
        """Each tier's next request, if it only needs a slot; in starting order."""
        order = self.queue.order()
        if capacity.places.floor:  # lower tiers below their share go first
            order.sort(key=lambda tier: self.held.below(tier + 1) >= capacity.places.floor)
        for tier in order:
            if self._has_room(tier, capacity):
                yield self.queue.head(tier, self._share(capacity))

    def start(self, ticket: Ticket, capacity: Capacity) -> None:
        """Start a ticket that heads its tenant's queue in its tier."""
        self.queue.start(ticket)
        self._start(ticket, self._most(capacity))

    def _has_place(self, capacity: Capacity) -> bool:
        return capacity.places.free(self.held, sum(self._window_requests)) > 0

    def _share(self, capacity: Capacity) -> Share | None:
        """The sort key of tenants: their share of slots where slots are scarce."""
        places, held = capacity.places, self.held
        if places.free(held, 0) >= self.queue.requests:
            return None
        return lambda tenant, weight: places.share(tenant, weight, held)

    def put_back(self, ticket: Ticket) -> None:
        """Return a started choice to the queue."""
        [request_id] = ticket.ids
        self.computed(request_id)
        part = self._parts.pop(request_id)
        self.held.count(part.ticket.tier, part.ticket.tenant, part.ticket.weight, -1)
        self.queue.push(ticket)

    def _most(self, capacity: Capacity) -> float:
        """The largest share of the window for one prompt: a worker's part, in tokens."""
        return capacity.tokens_per_s * self.limits.window_s / len(capacity.workers) or math.inf

    def _has_room(self, tier: int, capacity: Capacity) -> bool:
        """True if the window has room, or some worker is idle. One request may exceed the window."""
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
        self.held.count(ticket.tier, ticket.tenant, ticket.weight, ticket.requests)
        for request_id, work in zip(ticket.ids, ticket.works, strict=True):
            part = self._parts[request_id] = _Part(ticket, work, most)
            self._window_requests[ticket.tier] += 1
            self._window_work[ticket.tier] += work
            self._window_fill[ticket.tier] += part.fill

    # -- what becomes of it ------------------------------------------------------------------------------------------

    def withdraw(self, ticket: Ticket) -> None:
        """Remove a request whose client left, or that was refused. Idempotent."""
        if self.queue.remove(ticket):
            self._requests[ticket.tier] -= ticket.requests
        for request_id in ticket.ids:
            self.ended(request_id)

    def placed(self, request_id: str, work: int) -> None:
        """Record the remaining prompt work once the worker, and with it the cached prefix, is known."""
        part = self._parts.get(request_id)
        if part is not None and part.computing:
            tier = part.ticket.tier
            self._window_work[tier] += work - part.work
            self._window_fill[tier] -= part.fill
            self.queue.tiers[tier].charge(part.ticket.tenant, work - part.work)
            part.work = work
            self._window_fill[tier] += part.fill

    def computed(self, request_id: str) -> None:
        """Record a first token. Idempotent."""
        part = self._parts.get(request_id)
        if part is not None and part.computing:
            part.computing = False
            self._window_requests[part.ticket.tier] -= 1
            self._window_work[part.ticket.tier] -= part.work
            self._window_fill[part.ticket.tier] -= part.fill
            if not any(self._window_requests):
                self._window_fill = [0.0 for _ in TIERS]  # sums of floats drift from 0

    def ended(self, request_id: str, generated: int = 0) -> None:
        """Record the end of a started choice. Idempotent."""
        self.computed(request_id)
        part = self._parts.pop(request_id, None)
        if part is not None:
            self._requests[part.ticket.tier] -= 1
            self.held.count(part.ticket.tier, part.ticket.tenant, part.ticket.weight, -1)
            self.queue.tiers[part.ticket.tier].charge(part.ticket.tenant, GENERATED_TOKEN_WORK * generated)
