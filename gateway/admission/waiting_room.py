"""The waiting room of requests: `gateway.admission.policy` with a clock and callers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from common.errors import ServingError
from common.messages import NO_GOAL, ModelLoad, TenantPlaces
from gateway.admission.policy import Admission, RefusedError, RequestLimits
from gateway.admission.queue import TIERS, Ticket, tier_of
from gateway.admission.supply import Capacity, Holder, Newcomer
from gateway.request.active import ActiveRequest
from gateway.request.spec import GenerationSpec
from gateway.request.state import Phase
from gateway.tenants.tenants import Tenant

CAPACITY_FOR_S = 0.05  # heartbeats come each 0.5 s
HELP_PERIOD_S = 1.0  # freed blocks take a moment to reach a request
PROMISE_S = 2.5  # two heartbeats and a start
MAX_TOLD = 64  # tenants in a heartbeat
MEAN_WEIGHT = 0.1  # weight of the newest figure in a mean

# Moves a started request away from its workers until the future is done.
Preempt = Callable[[ActiveRequest, asyncio.Future[None]], None]


def prompt_tokens(spec: GenerationSpec) -> int:
    """All prompt tokens, as if nothing were cached."""
    return len(spec.token_ids)


def holder_of(request: ActiveRequest, now: float) -> Holder:
    spec, place = request.state.spec, request.place
    return Holder(
        request_id=spec.request_id,
        tenant=spec.origin.tenant.name,
        weight=spec.origin.tenant.weight,
        tier=tier_of(spec.priority),
        preemptions=place.preemptions,
        ran_s=now - place.since if place.since is not None else 0.0,
        return_s=place.return_s,
        waits=place.waits,
    )


class WaitingRoom:
    """`enter` returns when a request may start; then report `placed`, `computed` and `ended`."""

    def __init__(
        self,
        limits: RequestLimits,
        capacity: Callable[[], Capacity],
        *,
        work: Callable[[GenerationSpec], int] = prompt_tokens,
        started: Callable[[], Iterable[ActiveRequest]] = tuple,
        preempt: Preempt | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`started`: this room's requests between start and end. `preempt` None: no preemption."""
        self._started = started
        self._preempt = preempt
        self._work = work  # estimate of a request's uncached prompt tokens
        self._clock = clock
        self._admission = Admission(limits)
        self._look = capacity
        self._seen: tuple[float, Capacity] | None = None
        self._calls: dict[Ticket, asyncio.Future[None]] = {}
        self._returning: dict[str, Ticket] = {}  # preempted requests by id
        self._since: dict[str, float] = {}  # when each started choice got its slot
        self._mean_s = 0.0  # how long slots are held
        self._promised: list[float] = []  # until when slots are left to other gateways
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
            weight=tenant.weight,
        )
        try:
            self._admission.check(ticket, self._capacity(now), now)
        except RefusedError as refusal:
            self.refused[refusal.reason] += 1
            raise

    async def enter(self, specs: Sequence[GenerationSpec]) -> float:
        """Wait until all choices of one HTTP request may start; return the seconds waited.

        Raises RefusedError, also after waiting. A cancelled call gives up its place.
        """
        now = self._clock()
        capacity, ticket = self._capacity(now), ticket_of(specs, now)
        if self._admission.would_start(ticket, capacity, now):
            self._admission.start_at_once(ticket, capacity)
            self._note_start(ticket, capacity, now)
            return 0.0
        ticket = ticket_of(specs, now, work=self._work)  # looking up cached prefixes takes time
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
            self._forget(ticket.ids)
            self.pump()
            raise
        finally:
            del self._calls[ticket]
        return self._clock() - now

    def placed(self, spec: GenerationSpec, work: int) -> None:
        """Record that a worker is chosen, with `work` prompt tokens left to compute."""
        self._admission.placed(spec.request_id, work)

    def computed(self, spec: GenerationSpec, *, is_first: bool = True) -> None:
        """Record an attempt's first token. `is_first`: the request's, too."""
        self.work[spec.origin.tenant.name] += len(spec.token_ids) if is_first else 0
        self._admission.computed(spec.request_id)
        self.pump()

    def ended(self, spec: GenerationSpec, generated: int) -> None:
        self.work[spec.origin.tenant.name] += generated
        self._admission.ended(spec.request_id, generated)
        ticket = self._returning.get(spec.request_id)
        if ticket is not None:
            self._admission.withdraw(ticket)
            self._call(ticket)
        self._measure(spec.request_id)
        self.pump()

    def pump(self) -> None:
        """Start the requests that have room, and the next one in place of a tenant above its share."""
        if not self._admission.queue:
            return
        capacity = self._capacity(self._clock())
        while True:
            while (ticket := self._admission.next(capacity)) is not None:
                self._begin(ticket, capacity)
            # The first tier may have no victim while a higher tier's next request has one.
            if not any(self._make_room(ticket, capacity) for ticket in self._admission.heads(capacity)):
                return

    def _begin(self, ticket: Ticket, capacity: Capacity) -> None:
        self._note_start(ticket, capacity, self._clock())
        self._call(ticket)

    def _note_start(self, ticket: Ticket, capacity: Capacity, now: float) -> None:
        capacity.unplaced_tokens += ticket.work
        self._since |= dict.fromkeys(ticket.ids, now)

    def _call(self, ticket: Ticket) -> None:
        call = self._calls[ticket]
        if not call.done():
            call.set_result(None)
        if ticket.resumes:
            del self._calls[ticket], self._returning[ticket.ids[0]]

    # -- places ----------------------------------------------------------------------------------------------------

    def _make_room(self, ticket: Ticket, capacity: Capacity) -> bool:
        """Preempt for the next ticket; return True if some request was preempted."""
        claim = Newcomer(tenant=ticket.tenant, weight=ticket.weight, tier=ticket.tier)
        if not self._take_place(claim, capacity):
            return False
        if capacity.places.free(self._admission.held, 0) > 0:
            self._admission.start(ticket, capacity)
            self._begin(ticket, capacity)
        return True

    def _take_place(self, claim: Newcomer, capacity: Capacity, *, for_others: bool = False) -> bool:
        if self._preempt is None:
            return False
        now = self._clock()
        started = {one.state.spec.request_id: one for one in self._started() if one.may_give_way}
        started = {name: one for name, one in started.items() if name not in self._returning}
        started = {name: one for name, one in started.items() if name not in capacity.places.leaving}
        holders = [holder_of(one, now) for one in started.values()]
        victim = capacity.places.victim(claim, holders, self._admission.held)
        if victim is None or (for_others and not capacity.places.holds_most(victim.tenant, self._admission.held)):
            return False
        request = started[victim.request_id]
        spec = request.state.spec
        ticket = ticket_of([spec], now, work=self._work)
        ticket.first_token_by, ticket.resumes = request.started_at, True  # heads its tenant's queue
        self._admission.put_back(ticket)
        self._measure(spec.request_id)
        call = self._calls[ticket] = asyncio.get_running_loop().create_future()
        self._returning[spec.request_id] = ticket
        self._preempt(request, call)
        return True

    def _help_waiting(self, now: float) -> None:
        """Preempt for a started request that found every decode worker full."""
        for request in self._started():
            place = request.place
            if place.waits and now - place.helped_at >= HELP_PERIOD_S:
                place.helped_at = now
                spec, tenant = request.state.spec, request.state.spec.origin.tenant
                claim = Newcomer(tenant=tenant.name, weight=tenant.weight, tier=tier_of(spec.priority), is_started=True)
                self._take_place(claim, self._capacity(now))

    def _help_elsewhere(self, now: float) -> None:
        """Preempt for tenants that wait at other gateways, and leave them the slot until they can have seen it."""
        self._promised = [until for until in self._promised if until > now]
        capacity = self._capacity(now)
        if self._promised or capacity.places.free(self._admission.held, 0) > 0:
            return
        for newcomer in capacity.places.newcomers():
            if self._take_place(newcomer, capacity, for_others=True):
                self._promised.append(now + PROMISE_S)
                self._seen = None
                return

    def _measure(self, request_id: str) -> None:
        since = self._since.pop(request_id, None)
        if since is not None:
            held_s = self._clock() - since
            self._mean_s = held_s if not self._mean_s else self._mean_s + MEAN_WEIGHT * (held_s - self._mean_s)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._since.pop(request_id, None)

    def look_again(self) -> None:
        """Refuse requests that would be late by now, and start those that have room: the fleet may have changed."""
        now = self._clock()
        self._help_waiting(now)
        self._help_elsewhere(now)
        if self._admission.queue:
            for ticket, refusal in self._admission.late(self._capacity(now), now):
                self.refused[refusal.reason] += 1
                refusal.waited = True
                self._refuse(ticket, refusal)
            self.pump()

    @property
    def queued_requests(self) -> int:
        return self._admission.queue.requests

    @property
    def waits_for_places(self) -> bool:
        """True if the queue waits for decode workers, not for prefill workers."""
        if not self._admission.queue:
            return False
        return self._capacity(self._clock()).places.free(self._admission.held, 0) <= 0

    def load(self, active: Sequence[ActiveRequest]) -> ModelLoad:
        """This room's part of the heartbeat; `active` are the started requests."""
        return ModelLoad(
            waiting_tokens=self._admission.queue.work,
            started_tokens=self._admission.window_fill,
            unclaimed_tokens=sum(one.work for one in active if one.state.phase is Phase.QUEUED),
            tenants=self._tenants(active),
        )

    def _tenants(self, active: Sequence[ActiveRequest]) -> dict[str, TenantPlaces]:
        """Tenants that hold or await slots, those with most first.

        What `leaving` streams hold is no place to other gateways: they don't count those workers.
        """
        leaving = self._capacity(self._clock()).places.leaving
        left = Counter(one.state.spec.origin.tenant.name for one in active if one.state.spec.request_id in leaving)
        found = {
            name: TenantPlaces(held=max(0, amount - left[name]), weight=weight)
            for name, (amount, weight) in self._admission.held.tenants().items()
        }
        waiting = [(one.tenant, one.weight, one.tier, one.requests) for one in self._admission.queue]
        for request in active:
            if request.place.waits:
                spec, tenant = request.state.spec, request.state.spec.origin.tenant
                waiting.append((tenant.name, tenant.weight, tier_of(spec.priority), 1))
        for name, weight, tier, count in waiting if self.waits_for_places else ():
            before = found.get(name, TenantPlaces(tier=0))
            found[name] = TenantPlaces(
                held=before.held,
                waiting=before.waiting + count,
                tier=max(tier, before.tier if before.waiting else 0),
                weight=weight,
            )
        most = sorted(found, key=lambda name: -found[name].held - found[name].waiting)
        return {name: found[name] for name in most[:MAX_TOLD]}

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
            capacity = self._seen[1]
            total = capacity.places.total - len(self._promised)
            capacity.places = replace(capacity.places, total=total, mean_s=self._mean_s)
        return self._seen[1]


def ticket_of(
    specs: Sequence[GenerationSpec], now: float, *, work: Callable[[GenerationSpec], int] = prompt_tokens
) -> Ticket:
    """The choices of one HTTP request as a ticket. A prompt's first choice fills the cache for the others."""
    first, tenant = specs[0], specs[0].origin.tenant
    goal = first.goal if first.aim.is_needed else NO_GOAL
    works, known = [], set[int]()
    for spec in specs:
        works.append(0 if id(spec.token_ids) in known else work(spec))
        known.add(id(spec.token_ids))
    return Ticket(
        ids=tuple(spec.request_id for spec in specs),
        works=tuple(works),
        first_token_by=now + min(first.deadline_s, first.aim.first_token_s or first.deadline_s),
        begin_by=now + goal.ttft_s(0),
        good_by=now + goal.ttft_s(len(first.token_ids)),
        arrived_at=now,
        tier=tier_of(first.priority),
        tenant=tenant.name,
        weight=tenant.weight,
        share=tenant.queue_share,
    )
