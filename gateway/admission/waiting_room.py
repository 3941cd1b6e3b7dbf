"""Where requests wait until they may start: `gateway.admission.policy` with a clock and callers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from common.errors import ServingError
from common.messages import ModelLoad
from gateway.admission.policy import Admission, Capacity, RefusedError, RequestLimits
from gateway.admission.queue import TIERS, Ticket, tier_of
from gateway.request.active import ActiveRequest
from gateway.request.spec import GenerationSpec
from gateway.request.state import Phase
from gateway.tenants.tenants import Tenant

CAPACITY_FOR_S = 0.05  # heartbeats come each 0.5 s


def prompt_tokens(spec: GenerationSpec) -> int:
    """All prompt tokens, as if nothing were cached."""
    return len(spec.token_ids)


class WaitingRoom:
    """`enter` returns when a request may start; then tell the room of `placed`, `computed` and `ended`."""

    def __init__(
        self,
        limits: RequestLimits,
        capacity: Callable[[], Capacity],
        *,
        work: Callable[[GenerationSpec], int] = prompt_tokens,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work  # estimate of a request's uncached prompt tokens
        self._clock = clock
        self._admission = Admission(limits)
        self._look = capacity
        self._seen: tuple[float, Capacity] | None = None
        self._calls: dict[Ticket, asyncio.Future[None]] = {}
        self.refused: Counter[str] = Counter()  # by reason
        self.work: Counter[str] = Counter()  # prompt and generated tokens by tenant

    @property
    def in_flight(self) -> int:
        """Choices that wait or run."""
        return self._admission.in_flight

    @property
    def waiting(self) -> Mapping[str, tuple[int, int]]:
        """Tier -> choices and prompt tokens that wait here."""
        queues = zip(TIERS, self._admission.queue.tiers, strict=True)
        return {name: (queue.requests, queue.work) for name, queue in queues}

    def turn_away(self, tenant: Tenant, *, priority: int, first_token_s: float = math.inf) -> None:
        """Raise RefusedError if any request of the tenant would be refused now, however short."""
        now = self._clock()
        ticket = Ticket(
            ids=("",),
            works=(1,),
            first_token_by=now + first_token_s,
            tier=tier_of(priority),
            tenant=tenant.name,
            share=tenant.queue_share,
        )
        try:
            self._admission.check(ticket, self._capacity(now), now)
        except RefusedError as refusal:
            self.refused[refusal.reason] += 1
            raise

    async def enter(self, specs: Sequence[GenerationSpec]) -> float:
        """Wait until all choices of one HTTP request may start; return for how many seconds.

        Raises RefusedError, also after waiting. A cancelled call gives up its place.
        """
        now = self._clock()
        capacity, ticket = self._capacity(now), ticket_of(specs, now)
        if not self._admission.would_start(ticket, capacity, now):  # the look for cached prefixes costs time
            ticket = ticket_of(specs, now, work=self._work)
        try:
            self._admission.offer(ticket, capacity, now)
        except RefusedError as refusal:
            self.refused[refusal.reason] += 1
            raise
        call = self._calls[ticket] = asyncio.get_running_loop().create_future()
        try:
            self.pump()
            await call
        except BaseException:
            self._admission.withdraw(ticket)
            self.pump()
            raise
        finally:
            del self._calls[ticket]
        return self._clock() - now

    def placed(self, spec: GenerationSpec, work: int) -> None:
        """A worker is chosen; `work` prompt tokens are left to compute there."""
        self._admission.placed(spec.request_id, work)

    def computed(self, spec: GenerationSpec) -> None:
        self.work[spec.tenant.name] += len(spec.token_ids)
        self._admission.computed(spec.request_id)
        self.pump()

    def ended(self, spec: GenerationSpec, generated: int) -> None:
        self.work[spec.tenant.name] += generated
        self._admission.ended(spec.request_id, generated)
        self.pump()

    def pump(self) -> None:
        """Start the requests that have room."""
        if not self._admission.queue:
            return
        capacity = self._capacity(self._clock())
        while (ticket := self._admission.next(capacity)) is not None:
            capacity.unplaced_tokens += ticket.work
            if not self._calls[ticket].done():
                self._calls[ticket].set_result(None)

    def look_again(self) -> None:
        """Refuse requests that would be late by now, and start those that have room: the fleet may have changed."""
        if self._admission.queue:
            now = self._clock()
            for ticket, refusal in self._admission.late(self._capacity(now), now):
                self.refused[refusal.reason] += 1
                refusal.waited = True
                self._refuse(ticket, refusal)
            self.pump()

    @property
    def queued_requests(self) -> int:
        return self._admission.queue.requests

    def load(self, active: Iterable[ActiveRequest]) -> ModelLoad:
        """This room's part of the heartbeat; `active` are the started requests."""
        return ModelLoad(
            waiting_tokens=self._admission.queue.work,
            started_tokens=self._admission.window_fill,
            unclaimed_tokens=sum(one.work for one in active if one.state.phase is Phase.QUEUED),
        )

    def refuse_all(self, error: ServingError) -> None:
        for ticket in list(self._calls):
            if not ticket.started:
                self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: ServingError) -> None:
        if not self._calls[ticket].done():
            self._calls[ticket].set_exception(error)

    def _capacity(self, now: float) -> Capacity:
        if self._seen is None or now - self._seen[0] >= CAPACITY_FOR_S:
            self._seen = now, self._look()
        return self._seen[1]


def ticket_of(
    specs: Sequence[GenerationSpec], now: float, *, work: Callable[[GenerationSpec], int] = prompt_tokens
) -> Ticket:
    """The choices of one HTTP request as admission sees them. A prompt's first choice fills the cache for its others."""
    first = specs[0]
    works, known = [], set[int]()
    for spec in specs:
        works.append(0 if id(spec.token_ids) in known else work(spec))
        known.add(id(spec.token_ids))
    return Ticket(
        ids=tuple(spec.request_id for spec in specs),
        works=tuple(works),
        first_token_by=now + min(first.deadline_s, first.first_token_s or first.deadline_s),
        arrived_at=now,
        tier=tier_of(first.priority),
        tenant=first.tenant.name,
        weight=first.tenant.weight,
        share=first.tenant.queue_share,
    )
