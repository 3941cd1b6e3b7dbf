"""The supply of a fleet: prompts, by rates and queues of its workers, and places of the decode batch. No I/O, no clock.

docs/placement.md has the rules of places. A tenant's *share* is its places divided by its weight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from common.messages import TenantPlaces, WorkerState

FLOOR_SHARE = 0.1  # left to lower tiers by higher ones
AHEAD_SHARE = 1 / 16  # prompts computed ahead of free places
MIN_RUN_S = 1.0  # minimum decoding time between preemptions
RUN_PER_RETURN = 4.0  # the same, as a multiple of the last return
SHORT_PROMPT_S = 0.5  # an idle decode worker may start prompts this short outside the window
UNMEASURED_LOCAL_SHARE = 0.25  # assumed prefill rate of a decode worker, relative to the prefill rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A request without a batch slot."""

    tenant: str
    weight: float = 1.0
    tier: int = 1
    is_started: bool = False  # it counts as held already


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A started request."""

    request_id: str
    tenant: str
    weight: float = 1.0
    tier: int = 1
    preemptions: int = 0
    ran_s: float = 0.0  # decoding time since its last start
    return_s: float = 0.0  # duration of that start
    waits: bool = False  # every decode worker is full

    @property
    def is_ready(self) -> bool:
        """True if it ran long enough to be preempted."""
        return self.waits or self.ran_s >= max(MIN_RUN_S, RUN_PER_RETURN * self.return_s)


@dataclass(slots=True, eq=False)
class Held:
    """Batch slots by tier and tenant; a request counts from its start to its end."""

    _here: Counter[tuple[int, str]] = field(default_factory=Counter)
    _weights: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self._here.values())

    def count(self, tier: int, tenant: str, weight: float, amount: int) -> None:
        self._here[tier, tenant] += amount
        self._weights[tenant] = weight
        if not self._here[tier, tenant]:
            del self._here[tier, tenant]
        if not any(name == tenant for _, name in self._here):
            del self._weights[tenant]

    def below(self, tier: int) -> int:
        """Slots held by lower tiers."""
        return sum(amount for (own, _), amount in self._here.items() if own < tier)

    def of(self, tenant: str) -> int:
        return sum(amount for (_, name), amount in self._here.items() if name == tenant)

    def tenants(self) -> dict[str, tuple[int, float]]:
        """Tenant -> held slots and weight."""
        return {name: (self.of(name), weight) for name, weight in self._weights.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The fleet's batch slots for one model."""

    total: float = math.inf  # sequences that its decode workers take, and `leaving`
    leaving: frozenset[str] = frozenset()  # our streams at workers that take no new ones
    others: tuple[Mapping[str, TenantPlaces], ...] = ()  # other gateways' slots by tenant
    mean_s: float = 0.0  # mean time that a slot is held; 0: not measured
    elsewhere: int = field(init=False)  # slots held by other gateways' requests

    def __post_init__(self) -> None:
        object.__setattr__(self, "elsewhere", sum(one.held for other in self.others for one in other.values()))

    def free(self, held: Held, computing: int) -> float:
        """Requests that may start: free slots, and some prompts computed ahead of them."""
        ahead = min(computing, math.floor(AHEAD_SHARE * self.total)) if self.total < math.inf else 0
        return self.total + ahead - held.total - self.elsewhere

    @property
    def floor(self) -> int:
        """Slots that higher tiers leave to lower ones."""
        return max(0, min(math.ceil(FLOOR_SHARE * self.total), int(self.total) - 1)) if self.total < math.inf else 0

    def held_by(self, tenant: str, held: Held) -> int:
        return held.of(tenant) + sum(other[tenant].held for other in self.others if tenant in other)

    def newcomers(self) -> list[Newcomer]:
        """Tenants waiting at other gateways."""
        waiting = {name: one for other in self.others for name, one in other.items() if one.waiting}
        return [Newcomer(tenant=name, weight=one.weight, tier=one.tier) for name, one in waiting.items()]

    def holds_most(self, tenant: str, held: Held) -> bool:
        """True if no other gateway holds more of the tenant's slots: one gateway preempts, not all of them."""
        return all(other[tenant].held <= held.of(tenant) for other in self.others if tenant in other)

    def share(self, tenant: str, weight: float, held: Held) -> float:
        """The tenant's share with one more place."""
        return (self.held_by(tenant, held) + 1) / weight

    def part(self, tenant: str, weight: float, held: Held) -> float:
        """The tenant's long-run number of slots."""
        others = sum(other for name, (_, other) in held.tenants().items() if name != tenant)
        return max(1.0, self.total * weight / (weight + others))

    def is_owed(self, claim: Newcomer, held: Held) -> bool:
        """True if some request will be preempted."""
        if held.below(claim.tier) > self.floor or held.below(claim.tier + 1) < self.floor:
            return True
        return any(self._gives_way(name, weight, claim, held) for name, (_, weight) in held.tenants().items())

    def victim(self, claim: Newcomer, holders: Iterable[Holder], held: Held) -> Holder | None:
        """The request to preempt now, if any."""
        ready = [holder for holder in holders if holder.is_ready]
        lower = [one for one in ready if one.tier < claim.tier and held.below(claim.tier) > self.floor]
        same = [one for one in ready if one.tier == claim.tier and self._gives_way(one.tenant, one.weight, claim, held)]
        higher = [one for one in ready if one.tier > claim.tier and held.below(claim.tier + 1) < self.floor]
        return self._worst(lower or same or higher, held)

    def _gives_way(self, tenant: str, weight: float, claim: Newcomer, held: Held) -> bool:
        mine = (self.held_by(claim.tenant, held) + (not claim.is_started)) / claim.weight
        return tenant != claim.tenant and (self.held_by(tenant, held) - 1) / weight >= mine

    def _worst(self, holders: Sequence[Holder], held: Held) -> Holder | None:
        """The holder that gives way: of the lowest tier, then the largest share, first one without a place or spared so far."""
        return min(
            holders,
            key=lambda one: (
                one.tier,
                -self.held_by(one.tenant, held) / one.weight,
                not one.waits,
                one.preemptions,
                one.ran_s,
            ),
            default=None,
        )


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
    unplaced_tokens: int = 0  # started anywhere, in no worker's `queued_tokens` yet
    started_elsewhere: int = 0  # prompt tokens in the windows of other gateways
    waiting_elsewhere: int = 0  # prompt tokens that wait at other gateways
    passed: int = 0  # short prompts started outside the window
    places: Places = field(default_factory=Places)

    @cached_property
    def tokens_per_s(self) -> float:
        return sum(worker.tokens_per_s for worker in self.workers)

    @cached_property
    def _free(self) -> list[tuple[float, float]]:
        """(seconds until a worker is free, its rate), earliest first."""
        return sorted((w.queued_tokens / w.tokens_per_s, w.tokens_per_s) for w in self.workers)

    @cached_property
    def takes_turns(self) -> bool:
        """True if short prompts overtake long ones at the workers: those beside a batch are ordered so (`decode.pacing`)."""
        return bool(self.tokens_per_s) and all(worker.decodes for worker in self.workers)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that were started anywhere."""
        return self.unplaced_tokens + sum(worker.queued_tokens for worker in self.workers)

    def wait_s(self, ahead: float) -> float:
        """Seconds until `ahead` more prompt tokens are dispatched, each to a free worker, and a worker is free."""
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
        """Predicted TTFT of a prompt of `work` tokens behind `ahead` tokens; 0 while unmeasured."""
        if not self.tokens_per_s:
            return 0.0
        level = self.wait_s(ahead)
        return min(
            max(level, worker.queued_tokens / worker.tokens_per_s) + worker.fixed_s + work / worker.tokens_per_s
            for worker in self.workers
        )

    def computing_s(self, work: int) -> float:
        """Seconds of prefill on the fastest worker, without waiting."""
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
        """This gateway's window in prompt tokens: an equal share, or more if other gateways use less."""
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
