"""Islands of workers that can hand KV over to each other: same transport and, unless it crosses hosts, same host.

A fleet may be several islands, as where each of two hosts has workers with shared memory. A request stays on one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.messages import WorkerState
from gateway.placement.without_redis import Load


class Reach(NamedTuple):
    """The place of a worker's possible peers."""

    transport: str
    place: str  # "": anywhere, or unknown


def reach_of(state: WorkerState) -> Reach:
    region = state.region
    place = state.worker if region.transport == "local" else region.address.get("reach", "")
    return Reach(region.transport, place)


def reaches(one: Reach, other: Reach) -> bool:
    return one.transport == other.transport and (one.place == other.place or "" in (one.place, other.place))


def islands(reach: dict[str, Reach], decode: Iterable[WorkerState]) -> list[set[str]]:
    """The sets of workers that can hand over to each decode worker in the set. `reach`: of all workers, by name."""
    found: list[set[str]] = []
    for place in sorted({reach[state.worker] for state in decode}):
        island = {name for name, other in reach.items() if reaches(place, other)}
        if island not in found:
            found.append(island)
    return found


def least_busy(found: Sequence[set[str]], loads: Iterable[Load], exclude: Sequence[str]) -> set[str]:
    """The island with the largest share of free batch slots; excluded workers are a last resort."""
    decode = [load for load in loads if "decode" in load.state.roles]
    allowed = [load for load in decode if load.state.worker not in exclude] or decode

    def busy(island: set[str]) -> float:
        members = [load for load in allowed if load.state.worker in island]
        taken = sum(max(load.sequences, load.state.running + load.state.waiting) for load in members)
        return taken / max(1, sum(load.state.max_sequences for load in members)) if members else float("inf")

    return min(found, key=busy)
