"""Queues of waiting requests, by tier and tenant: the order in which they start. No I/O, no clock.

- **Tiers**: the highest first. A lower tier that waits earns credit, `FLOOR_SHARE` of the work that higher tiers start, and its
  next ticket starts when paid for. So nothing starves.
- **Tenants** of a tier: start-time fair queueing. A tenant's tag is its work divided by its weight; the lowest tag is next. A
  tenant that begins to wait gets at least the tag that was served last, so idling saves nothing up.
- **Deadlines** of a tenant: earliest first.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

TIERS = ("low", "normal", "high")
HIGH = len(TIERS) - 1
FLOOR_SHARE = 0.1


Share = Callable[[str, float], float]  # (tenant, weight) -> its share of the slots with one more


def tier_of(priority: int) -> int:
    """The tier of a client's `priority`: its sign."""
    return 1 + (priority > 0) - (priority < 0)


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """The choices of one HTTP request, which start together or not at all. Instants are of the caller's clock."""

    ids: tuple[str, ...]  # one id a choice
    works: tuple[int, ...]  # prompt tokens to compute, one number a choice
    first_token_by: float  # deadline of the first token
    # It is refused if it can't begin, or have its first token, by then; once started it is served however late.
    begin_by: float = math.inf
    good_by: float = math.inf
    arrived_at: float = 0.0
    tier: int = 1
    tenant: str = "default"
    weight: float = 1.0
    share: float = 1.0  # share of the queue that the tenant may fill
    started: bool = False
    resumes: bool = False  # it was preempted after its client got tokens
    work: int = field(init=False)  # sum over the choices, at least 1

    def __post_init__(self) -> None:
        self.work = max(1, sum(self.works))

    @property
    def due(self) -> float:
        """The instant that its place in its tenant's queue goes by."""
        return min(self.first_token_by, self.begin_by)

    @property
    def requests(self) -> int:
        return len(self.ids)


@dataclass(slots=True, eq=False)
class _Line:
    """One tenant's waiting tickets in a tier."""

    weight: float = 1.0
    tag: float = 0.0
    order: list[tuple[float, int, Ticket]] = field(default_factory=list)  # by deadline, then arrival
    work: int = 0


class FairQueue:
    """The waiting tickets of one tier."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._virtual = 0.0
        self._arrivals = 0
        self._size = 0
        self.requests = 0
        self.work = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Ticket]:
        for line in self._lines.values():
            for _, _, ticket in line.order:
                yield ticket

    def push(self, ticket: Ticket) -> None:
        line = self._lines.setdefault(ticket.tenant, _Line())
        line.weight = ticket.weight
        if not line.order:
            line.tag = max(line.tag, self._virtual)
        self._arrivals += 1
        insort(line.order, (ticket.due, self._arrivals, ticket))
        self._count(line, ticket, 1)

    def head(self, share: Share | None = None) -> Ticket | None:
        """The next ticket to start: of the lowest share, if shares are given."""
        waiting = self._in_turn(share)
        return self._lines[waiting[0]].order[0][2] if waiting else None

    def _in_turn(self, share: Share | None) -> list[str]:
        """The waiting tenants in starting order."""
        lines = [(name, line) for name, line in self._lines.items() if line.order]
        waiting = [(share(name, line.weight) if share else 0.0, line.tag, name) for name, line in lines]
        return [name for _, _, name in sorted(waiting)]

    def pop(self) -> Ticket:
        """Start the next ticket."""
        ticket = self.head()
        if ticket is None:
            raise LookupError("nobody waits")
        self.start(ticket)
        return ticket

    def start(self, ticket: Ticket) -> None:
        """Start the first ticket of a tenant and account for its work."""
        line = self._lines[ticket.tenant]
        line.order.pop(0)
        self._count(line, ticket, -1)
        self._virtual = max(self._virtual, line.tag)
        line.tag += ticket.work / line.weight
        self._forget()

    def pop_short(self, most: float, share: Share | None) -> Ticket | None:
        """Start the next ticket of at most this much work, even if longer ones are due earlier."""
        for name in self._in_turn(share):
            ticket = next((one for _, _, one in self._lines[name].order if one.work <= most), None)
            if ticket is not None:
                self.remove(ticket)
                self._lines[name].tag += ticket.work / self._lines[name].weight
                return ticket
        return None

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket without starting it; return True if it waited here."""
        line = self._lines.get(ticket.tenant)
        if line is None:
            return False
        for index, entry in enumerate(line.order):
            if entry[2] is ticket:
                del line.order[index]
                self._count(line, ticket, -1)
                return True
        return False

    def charge(self, tenant: str, work: float) -> None:
        """Add work that a tenant's tickets didn't announce (negative: they announced too much)."""
        if (line := self._lines.get(tenant)) is not None:
            line.tag += work / line.weight

    def work_before(self, ticket: Ticket) -> float:
        """Prompt tokens that start before a ticket: its tenant's earlier ones, and other tenants' until then."""
        own = self._lines.get(ticket.tenant, _Line())
        ahead = 0.0
        for _, _, other in own.order[: bisect_right(own.order, ticket.due, key=lambda entry: entry[0])]:
            if other is ticket:
                break
            ahead += other.work
        tag = (own.tag if own.order else max(own.tag, self._virtual)) + ahead / ticket.weight
        return ahead + sum(
            min(line.work, max(0.0, (tag - line.tag) * line.weight))
            for line in self._lines.values()
            if line is not own and line.order
        )

    def _count(self, line: _Line, ticket: Ticket, sign: int) -> None:
        line.work += sign * ticket.work
        self.work += sign * ticket.work
        self.requests += sign * ticket.requests
        self._size += sign

    def _forget(self) -> None:
        """Drop idle tenants whose virtual finish time has passed."""
        idle = [name for name, line in self._lines.items() if not line.order and line.tag <= self._virtual]
        for name in idle:
            del self._lines[name]


class TieredQueue:
    """All waiting tickets."""

    def __init__(self) -> None:
        self.tiers = tuple(FairQueue() for _ in TIERS)
        self._credit = [0.0 for _ in TIERS]
        self.requests_of: dict[str, int] = {}  # tenant -> waiting choices
        self.work_of: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self.tiers))

    def __bool__(self) -> bool:
        return bool(self.requests_of)

    def __iter__(self) -> Iterator[Ticket]:
        for tier in reversed(self.tiers):
            yield from tier

    @property
    def requests(self) -> int:
        return sum(tier.requests for tier in self.tiers)

    @property
    def work(self) -> int:
        return sum(tier.work for tier in self.tiers)

    def push(self, ticket: Ticket) -> None:
        self.tiers[ticket.tier].push(ticket)
        self._count(ticket, 1)

    def order(self) -> list[int]:
        """The waiting tiers in order: those with enough credit, then from the highest down."""
        waiting = [tier for tier in reversed(range(len(TIERS))) if self.tiers[tier]]
        earned = [tier for tier in waiting if self._credit[tier] >= self._price(tier)]
        return sorted(waiting, key=lambda tier: (tier not in earned, -tier))

    def head(self, tier: int, share: Share | None = None) -> Ticket:
        """The next ticket of a waiting tier."""
        ticket = self.tiers[tier].head(share)
        if ticket is None:
            raise LookupError("nobody waits")
        return ticket

    def pop(self, tier: int) -> Ticket:
        """Start the next ticket of a tier."""
        ticket = self.head(tier)
        self.start(ticket)
        return ticket

    def start(self, ticket: Ticket) -> None:
        """Start the first ticket of a tenant and tier."""
        tier = ticket.tier
        self.tiers[tier].start(ticket)
        self._count(ticket, -1)
        for lower in range(tier):
            if self.tiers[lower]:
                self._credit[lower] += FLOOR_SHARE * ticket.work
        self._credit[tier] = max(0.0, self._credit[tier] - ticket.work) if self.tiers[tier] else 0.0

    def pop_short(self, tier: int, most: float, share: Share | None = None) -> Ticket | None:
        """Start the next ticket of a tier that has at most this much work, at no cost in credit."""
        ticket = self.tiers[tier].pop_short(most, share)
        if ticket is not None:
            self._count(ticket, -1)
            if not self.tiers[tier]:
                self._credit[tier] = 0.0
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket without starting it; return True if it waited here."""
        if not self.tiers[ticket.tier].remove(ticket):
            return False
        self._count(ticket, -1)
        if not self.tiers[ticket.tier]:
            self._credit[ticket.tier] = 0.0
        return True

    def work_before(self, ticket: Ticket) -> float:
        """Prompt tokens that start before a ticket if nobody leaves, without the lower tiers' share."""
        own = self.tiers[ticket.tier].work_before(ticket)
        higher: float = sum(queue.work for queue in self.tiers[ticket.tier + 1 :])
        unearned = max(0.0, own + ticket.work - self._credit[ticket.tier])
        return own + min(higher, unearned / FLOOR_SHARE)  # by then its tier has earned its start

    def _price(self, tier: int) -> float:
        """The credit that a tier's next ticket costs."""
        head = self.tiers[tier].head()
        return float(head.work) if head is not None else 0.0

    def _count(self, ticket: Ticket, sign: int) -> None:
        for counts, amount in ((self.requests_of, ticket.requests), (self.work_of, ticket.work)):
            counts[ticket.tenant] = counts.get(ticket.tenant, 0) + sign * amount
            if not counts[ticket.tenant]:
                del counts[ticket.tenant]
