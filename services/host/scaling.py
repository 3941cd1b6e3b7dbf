"""The choice of single workers to start and to stop: a pure function of the planner's counts and of what each host says it has.

All hosts compute all steps, from the same heartbeats, and take their own. A missing worker is started where one is spare: at the
host with the fewest of the model, of these with the most spare, of these by name. A surplus one is stopped where the most are.
No role of a model loses its last worker, and a worker with both roles goes when neither needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from common.messages import HostedModel
from common.words import Role

# The roles with which a service's workers start.
ROLES_OF: dict[str, tuple[str, ...]] = {
    "prefill": (Role.PREFILL,),
    "decode": (Role.DECODE,),
    "worker": (Role.PREFILL, Role.DECODE),
    "pool": (Role.POOL,),
}

MOST = 1_000  # workers of a model that steps are computed for, whatever is said


@dataclass(frozen=True, slots=True)
class Change:
    """A host's own part: services of which to start a worker each, and workers to stop, by name."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def change_of(
    own: str, wanted: Mapping[str, int], offers: Mapping[str, HostedModel], elsewhere: Iterable[Collection[str]] = ()
) -> Change:
    """Return what a host should change for one model now.

    `wanted`: workers by role. `offers`: what each host says of the model, the own one included. `elsewhere`: the roles of each
    worker that no host started.
    """
    there = {host: dict(offer.workers) for host, offer in offers.items()}
    counts = Counter(role for roles in elsewhere for role in roles)
    counts.update(role for workers in there.values() for roles in workers.values() for role in roles)
    start = [service for host, service in _started(wanted, offers, counts) if host == own]
    stop = [worker for host, worker in _stopped(wanted, offers, counts) if host == own]
    return Change(tuple(start), tuple(stop))


def _started(
    wanted: Mapping[str, int], offers: Mapping[str, HostedModel], counts: Counter[str]
) -> list[tuple[str, str]]:
    """Hosts and services; `counts` grows by them."""
    spare = {(host, service): left for host, offer in offers.items() for service, left in offer.spare.items()}
    wanted = {role: min(count, MOST) for role, count in wanted.items()}
    size = Counter({host: len(offer.workers) for host, offer in offers.items()})
    found: list[tuple[str, str]] = []
    for role in sorted(wanted):
        while counts[role] < wanted[role]:
            able = [(host, service) for (host, service), left in spare.items() if left and role in _roles(service)]
            if not able:
                break
            best = min(able, key=lambda one: (len(_roles(one[1])), size[one[0]], -spare[one], *one))
            spare[best] -= 1
            size[best[0]] += 1
            counts.update(_roles(best[1]))
            found.append(best)
    for one in [*found]:  # one of both roles may have made another one needless
        if all(counts[role] > wanted.get(role, 0) for role in _roles(one[1])):
            counts.subtract(_roles(one[1]))
            found.remove(one)
    return found


def _stopped(
    wanted: Mapping[str, int], offers: Mapping[str, HostedModel], counts: Counter[str]
) -> list[tuple[str, str]]:
    """Hosts and workers; `counts` falls by them."""
    left = {
        (host, worker): offer.workers[worker]
        for host, offer in offers.items()
        for worker in offer.extra
        if offer.workers.get(worker)
    }
    size = Counter({host: len(offer.workers) for host, offer in offers.items()})
    found: list[tuple[str, str]] = []
    while able := [
        one
        for one, roles in left.items()
        if all(role in wanted and counts[role] > max(1, wanted[role]) for role in roles)
    ]:
        best = max(able, key=lambda one: (size[one[0]], *one))
        counts.subtract(left.pop(best))
        size[best[0]] -= 1
        found.append(best)
    return found


def _roles(service: str) -> tuple[str, ...]:
    return ROLES_OF.get(service, ())
