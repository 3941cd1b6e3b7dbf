"""The counts of workers that pool, for hosts that start and stop them.

A worker's pressure is the share of time in which it computes, and the seconds that its waiting texts take as a share of the
horizon. It has the thresholds of prefill. Each worker tells its own load, so models and versions don't matter here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from common.messages import WorkerState
from common.peers import Incarnation, incarnation_of
from common.words import Role
from planner.counts import Held, held_after
from planner.settings import PlanSettings

MEMORY = 0.5  # share of the average so far: heartbeats and decisions have other periods


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker at the last look."""

    pass_s: float  # computed since its start
    busy: float | None = None  # share of time, averaged; None: seen once


@dataclass(frozen=True, slots=True)
class Pools:
    """The workers of a model that pools, and the memory for the next look. Instants are of one clock."""

    began_at: float
    at: float
    workers: Mapping[Incarnation, Seen]
    pressure: float
    desired: int
    held: Held | None = None  # None: not watched for long enough

    def told(self) -> dict[str, int]:
        """The workers that the model should have, by role; empty before they are known."""
        return {} if self.held is None else {str(Role.POOL): self.held.count}

    @property
    def reason(self) -> str:
        return f"pool has a pressure of {self.pressure:.2f}: {self.desired} of {len(self.workers)} workers"


def by_model(states: Iterable[WorkerState]) -> dict[str, list[WorkerState]]:
    """The workers of each model."""
    found: dict[str, list[WorkerState]] = {}
    for state in states:
        found.setdefault(state.model, []).append(state)
    return found


def look(now: float, states: Collection[WorkerState], before: Pools | None, settings: PlanSettings) -> Pools:
    """Take the heartbeats of a model's ready workers, one at least; `before`: None for the first look."""
    workers = {incarnation_of(state): _seen(now, state, before) for state in states}
    total = sum(min(1.0, seen.busy or 0.0) for seen in workers.values())
    total += sum(_waiting_s(state, states) for state in states) / settings.horizon_s
    pressure, count = total / len(workers), len(workers)
    desired, band = count, settings.prefill
    if pressure > band.high:
        desired = max(count + 1, math.ceil(total / band.high))
    elif (fewer := max(1, math.ceil(total / band.low))) < count:
        desired = fewer
    began_at, held = (now, None) if before is None else (before.began_at, before.held)
    if held is not None:
        held = held_after(now, held, desired, count, settings, may_grow=True)
    elif now - began_at >= settings.hold_s:
        held = Held(count, now, count)
    return Pools(began_at, now, workers, pressure, desired, held)


def _seen(now: float, state: WorkerState, before: Pools | None) -> Seen:
    pass_s = state.totals.pass_s
    known = None if before is None else before.workers.get(incarnation_of(state))
    if before is None or known is None or now <= before.at:
        return Seen(pass_s)
    computed_s = pass_s - known.pass_s
    # A pass counts when it ends: of a long one nothing is known meanwhile.
    share = 1.0 if state.busy and not computed_s else computed_s / (now - before.at)
    return Seen(pass_s, share if known.busy is None else MEMORY * known.busy + (1 - MEMORY) * share)


def _waiting_s(state: WorkerState, states: Collection[WorkerState]) -> float:
    """Seconds that a worker's waiting texts take; one that has computed nothing yet counts as average."""
    known = [other.prefill_tokens_per_s for other in states if other.prefill_tokens_per_s]
    rate = state.prefill_tokens_per_s or (sum(known) / len(known) if known else 0.0)
    return state.queued_tokens / rate if rate else 0.0
