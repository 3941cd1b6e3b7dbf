"""The choice of the next role change: a pure function of an observation and the memory of the last decision.

A role is *pressed* when its pressure is above its upper threshold, or above `least_load` while too few requests meet its
service level (time to first token: prefill; time per token: decode).
A pressed role gets a worker of the other one when all of this holds:

- the other role is not pressed, and the move leaves it below its lower threshold;
- the larger pressure falls by at least `least_gain`;
- this has held for `hold_s`; the last move is `cooldown_s` ago, and the last one the other way `reverse_s`;
- the worker is not the last of its role;
- all its model's workers have the same weights, and gateways report the load by model;
- it is not a decode worker while too few requests have their tokens in time.

Under constant load this comes to rest: the giving role stays below its lower threshold, so nothing is given back.
Workers with both roles count for both and keep them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.words import Role
from planner.observed import ROLES, Observed, WorkerLoad, with_role
from planner.pressure import Pressures, level, misses_level, occupancy, pressures_of, rate_of, steps_of
from planner.settings import PlanSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory passed from one decision to the next."""

    pressed: Role | None = None  # the role that needs a worker
    since: float = 0.0  # since when
    moved_to: Role | None = None  # the role that gained in the last move
    moved_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A worker's new roles, replacing the present ones."""

    worker: str
    roles: tuple[Role, ...]
    expected: Pressures  # predicted, after the move


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """At most one move, the reason, and an autoscaler's target number of workers by role."""

    move: Move | None
    reason: str
    pressures: Pressures
    desired: dict[Role, int]
    memory: Memory


def plan(now: float, observed: Observed, memory: Memory, settings: PlanSettings) -> Decision:
    """Decide. `now` is a monotonic clock in seconds. The returned memory goes into the next call."""
    observed = replace(observed, workers=tuple(sorted(observed.workers, key=lambda worker: worker.worker)))
    pressures = pressures_of(observed.workers, observed, settings)
    pressed = [role for role in ROLES if _is_pressed(role, pressures, observed, settings)]
    desired = _desired(pressures, pressed, observed, settings)
    move, reason = None, "no role is pressed"
    if observed.num_models > 1:
        reason = (
            f"several weights: this model's workers have {observed.num_models} kinds, whose load is told as one sum"
        )
    elif observed.is_sum:
        reason = "several models: a gateway of an older release tells their load as one sum"
    elif len(pressed) == len(ROLES):
        reason = "both roles are pressed: only more workers help"
    elif pressed:
        move, reason = _best_move(pressed[0], pressures, observed, settings)
    gaining = pressed[0] if move else None
    since = memory.since if gaining and memory.pressed == gaining else now
    memory = replace(memory, pressed=gaining, since=since)
    if move and gaining:
        waits = _must_wait(now, gaining, memory, settings)
        if waits:
            move, reason = None, f"{reason}; {waits}"
        else:
            memory = Memory(moved_to=gaining, moved_at=now)
    return Decision(move=move, reason=reason, pressures=pressures, desired=desired, memory=memory)


def _is_pressed(role: Role, pressures: Pressures, observed: Observed, settings: PlanSettings) -> bool:
    if pressures.of(role) > settings.band_of(role).high:
        return True
    return pressures.of(role) > settings.least_load and misses_level(role, observed, settings)


# -- the choice ----------------------------------------------------------------------------------------------------


def _best_move(gaining: Role, before: Pressures, observed: Observed, settings: PlanSettings) -> tuple[Move | None, str]:
    """The move that helps `gaining`, or None with the reason."""
    giving = Role.DECODE if gaining == Role.PREFILL else Role.PREFILL
    reason = f"{gaining} is pressed: {before.of(gaining):.2f}"
    if before.of(gaining) <= settings.band_of(gaining).high:
        met, total = level(gaining, observed)
        reason += f" with {met} of {total} in time"
    donors = [worker for worker in observed.workers if worker.roles == (giving,) and worker.movable]
    if len(with_role(observed.workers, giving)) < 2 or not donors:
        return None, f"{reason}, but no {giving} worker can be spared"
    if giving == Role.DECODE and misses_level(Role.DECODE, observed, settings):
        return None, f"{reason}, but decode has {observed.tpot_met} of {observed.tpot_count} in time"
    donor = min(donors, key=_cost_of_leaving)
    after = _after(donor, gaining, observed, settings)
    if after.of(giving) > settings.band_of(giving).low:
        return None, f"{reason}, but {giving} would be at {after.of(giving):.2f} without {donor.worker}"
    if _worst(after, settings) > (1 - settings.least_gain) * _worst(before, settings):
        return None, f"{reason}, but {donor.worker} would not help: {after.of(gaining):.2f}"
    reason += (
        f"; with {donor.worker} {after.of(gaining):.2f}, {giving} {before.of(giving):.2f} to {after.of(giving):.2f}"
    )
    return Move(worker=donor.worker, roles=(gaining,), expected=after), reason


def _cost_of_leaving(worker: WorkerLoad) -> tuple[int, int, int, str]:
    """Sort key: the worker with the least work to finish leaves first."""
    return worker.sequences, worker.queued_tokens, worker.used_blocks, worker.worker


def _after(donor: WorkerLoad, gaining: Role, observed: Observed, settings: PlanSettings) -> Pressures:
    """The pressures after the move. More prefill capacity sends more prompts on to decode."""
    workers = [replace(worker, roles=(gaining,)) if worker is donor else worker for worker in observed.workers]
    growth = 1.0
    if gaining == Role.PREFILL:
        rate = sum(rate_of(worker, observed.workers) for worker in with_role(observed.workers, Role.PREFILL))
        more = sum(rate_of(worker, observed.workers) for worker in with_role(workers, Role.PREFILL))
        growth = max(1.0, min(observed.arriving_tokens_per_s, more) / rate) if rate else 1.0
    return pressures_of(workers, observed, settings, growth=growth)


def _must_wait(now: float, gaining: Role, memory: Memory, settings: PlanSettings) -> str:
    """Return why a good move must wait; "" if it need not."""
    if now - memory.since < settings.hold_s:
        return f"for {now - memory.since:.0f} of {settings.hold_s:.0f} s"
    if memory.moved_to is None:
        return ""
    pause_s = settings.cooldown_s if memory.moved_to == gaining else max(settings.reverse_s, settings.cooldown_s)
    ago = now - memory.moved_at
    return f"the last move was {ago:.0f} s ago, {pause_s:.0f} needed" if ago < pause_s else ""


# -- for whoever starts and stops workers ------------------------------------------------------------------------------


def _desired(
    pressures: Pressures, pressed: Sequence[Role], observed: Observed, settings: PlanSettings
) -> dict[Role, int]:
    """Workers of each role that would bring its pressure between its thresholds; the present number if it is there already.

    Long steps ask for more decode workers only as far as those would shorten them. Prefill may fall to 0 without prompts;
    decode may not, as it serves everybody.
    """
    desired: dict[Role, int] = {}
    for role in ROLES:
        count = len(with_role(observed.workers, role))
        least = 1 if role == Role.DECODE or (count and _prompts_come(observed)) else 0
        wanted = count
        if role in pressed:
            more = count + 1 if role == Role.PREFILL or _more_decode_helps(observed, settings) else count
            wanted = max(more, _enough(role, settings.band_of(role).high, pressures, observed, settings))
        elif (fewer := _enough(role, settings.band_of(role).low, pressures, observed, settings)) < count:
            wanted = fewer
        desired[role] = max(wanted, least)
    return desired


def _prompts_come(observed: Observed) -> bool:
    waiting = observed.unclaimed_tokens + sum(worker.queued_tokens for worker in observed.workers)
    return waiting > 0 or observed.arriving_tokens_per_s > 0


def _enough(role: Role, share: float, pressures: Pressures, observed: Observed, settings: PlanSettings) -> int:
    """The fewest workers that bring the role's pressure to at most `share`, ignoring step times that they can't shorten."""
    workers = with_role(observed.workers, role)
    if role == Role.PREFILL:
        return math.ceil(len(workers) * pressures.prefill / share)
    by_step = steps_of(observed).workers_for(share * settings.step_level_ms) or len(workers)
    return max(math.ceil(len(workers) * occupancy(workers, observed, 1.0) / share), by_step)


def _more_decode_helps(observed: Observed, settings: PlanSettings) -> bool:
    """True if more workers would shorten the step: not if it is long even without a batch."""
    decode = with_role(observed.workers, Role.DECODE)
    steps = steps_of(observed)
    by_room = occupancy(decode, observed, 1.0) * settings.step_level_ms >= steps.on(len(decode))
    return by_room or steps.shared_ms >= settings.least_gain * len(decode) * steps.on(len(decode))


def _worst(pressures: Pressures, settings: PlanSettings) -> float:
    """The larger of both pressures, each relative to its upper threshold."""
    return max(pressures.of(role) / settings.band_of(role).high for role in ROLES)
