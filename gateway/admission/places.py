"""Batch slots by tenant and tier: who holds them, who gets the next one, who gives one back. No I/O, no clock.

docs/placement.md has the rules. A tenant's *share* is its places divided by its weight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.messages import TenantPlaces

FLOOR_SHARE = 0.1  # left to lower tiers by higher ones
AHEAD_SHARE = 1 / 16  # prompts computed ahead of free places
MIN_RUN_S = 1.0  # minimum decoding time between preemptions
RUN_PER_RETURN = 4.0  # the same, as a multiple of the last return


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
        """Of the lowest tier and the largest share one that has no place yet, or was spared so far."""
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
