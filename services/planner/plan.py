"""Which worker should change its role: a pure function of what was observed and of what it remembers. No I/O, no clock.

Two pressures describe a fleet, each as a share of what its workers can do; above 1 work piles up.

    prefill   (prompt tokens that arrive in the horizon + those that wait) / tokens that the prefill workers compute in it
    decode    the larger of: sequences / room for sequences, KV blocks in use / KV blocks

A role is *pressed* above its upper threshold, or above `least_load` when too few requests meet its service level (time to
first token: prefill, time per token: decode). A pressed role gets a worker of the other one when all of this holds:

- the other role is not pressed, and stays under its own lower threshold without that worker, with what the move adds to it;
- the larger pressure falls by at least `least_gain`;
- this was so for `hold_s` without a break; the last move is `cooldown_s` ago, and one the other way `reverse_s`;
- the worker is not the last of its role.

Under constant load this comes to rest: a move leaves the giving role under its lower threshold, so it is not pressed and
nothing is given back. Workers with both roles count for both and are left as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Thresholds are shares of capacity, times seconds."""

    horizon_s: float = 1.0  # waiting prompts should be computed within this: the service level of the first token
    hold_s: float = 10.0  # for so long a role must be pressed
    cooldown_s: float = 30.0  # between two moves
    reverse_s: float = 120.0  # between a move and one the other way
    prefill_high: float = 0.9  # pressed above this
    prefill_low: float = 0.6  # what a prefill worker's leaving may bring the others to
    decode_high: float = 0.85
    decode_low: float = 0.6
    least_load: float = 0.5  # below this pressure a missed service level is not the number of workers' fault
    least_gain: float = 0.05  # by which share the larger pressure must fall
    attainment: float = 0.95  # share of requests that should meet a service level
    least_samples: int = 10  # fewer say nothing about a service level

    def __post_init__(self) -> None:
        if not (0 < self.prefill_low < self.prefill_high and 0 < self.decode_low < self.decode_high):
            raise ValueError("each low threshold must be above 0 and below its high one, or roles would go to and fro")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One worker that takes new work. Rates are what it measured, 0 = not yet."""

    worker: str
    roles: tuple[Role, ...]
    sequences: int = 0  # in its batch, or waiting to get in
    max_sequences: int = 1
    used_blocks: int = 0  # KV that can't be evicted
    num_blocks: int = 1
    queued_tokens: int = 0  # prompt tokens claimed and not computed
    prefill_tokens_per_s: float = 0.0
    movable: bool = True  # False: it refused to change its roles


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The fleet at one instant. Counts of service levels are of a recent window, over all gateways."""

    workers: tuple[WorkerLoad, ...]
    unclaimed_tokens: int = 0  # prompt tokens that no worker has taken yet
    handing_over: int = 0  # requests with a first token that no decode worker has yet
    arriving_tokens_per_s: float = 0.0  # prompt tokens for prefill workers
    ttft_met: int = 0
    ttft_count: int = 0
    tpot_met: int = 0
    tpot_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one decision leaves to the next."""

    pressed: Role | None = None  # the role that would get a worker
    since: float = 0.0  # without a break
    moved_to: Role | None = None  # by the last move
    moved_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressures:
    prefill: float
    decode: float

    def of(self, role: Role) -> float:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`worker` gets `roles` instead of what it has."""

    worker: str
    roles: tuple[Role, ...]
    expected: Pressures  # afterwards, by the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """At most one move, why, and how many workers of each role would be enough (for whoever starts and stops them)."""

    move: Move | None
    reason: str
    pressures: Pressures
    desired: dict[Role, int]
    memory: Memory


def plan(now: float, observed: Observed, memory: Memory, settings: PlanSettings) -> Decision:
    """Decide. `now`: seconds of any clock that never goes back; pass the returned memory to the next call."""
    observed = replace(observed, workers=tuple(sorted(observed.workers, key=lambda worker: worker.worker)))
    pressures = pressures_of(observed.workers, observed, settings)
    pressed = [role for role in ROLES if _is_pressed(role, pressures, observed, settings)]
    desired = _desired(pressures, pressed, observed, settings)
    move, reason = None, "no role is pressed"
    if len(pressed) == len(ROLES):
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


# -- the model -----------------------------------------------------------------------------------------------------


def pressures_of(
    workers: Sequence[WorkerLoad], observed: Observed, settings: PlanSettings, *, growth: float = 1.0
) -> Pressures:
    """The pressures if the fleet were `workers`, under the observed load; `growth`: of what decodes."""
    prefill, decode = _with(workers, "prefill"), _with(workers, "decode")
    rate = sum(_rate(worker, observed.workers) for worker in prefill)
    decode_pressure = _occupancy(decode, observed, growth)
    waiting = sum(worker.queued_tokens for worker in observed.workers)
    if not _waits_for_decode(observed, settings):
        waiting += observed.unclaimed_tokens
    tokens = observed.arriving_tokens_per_s + waiting / settings.horizon_s
    return Pressures(prefill=tokens / rate if rate else 0.0, decode=decode_pressure)


def _occupancy(decode: Sequence[WorkerLoad], observed: Observed, growth: float) -> float:
    """The load of all that decode today, put on the workers `decode`."""
    today = _with(observed.workers, "decode")
    sequences = sum(worker.sequences for worker in today) + observed.handing_over
    blocks = sum(worker.used_blocks for worker in today)
    room_sequences = sum(worker.max_sequences for worker in decode)
    room_blocks = sum(worker.num_blocks for worker in decode)
    return growth * max(sequences / max(room_sequences, 1), blocks / max(room_blocks, 1))


def _waits_for_decode(observed: Observed, settings: PlanSettings) -> bool:
    """Prefill workers hold finished prompts because decode is full: what queues up then says nothing about prefill."""
    full = _occupancy(_with(observed.workers, "decode"), observed, 1.0) > settings.decode_high
    return full and observed.handing_over > 0


def _rate(worker: WorkerLoad, fleet: Iterable[WorkerLoad]) -> float:
    """Prompt tokens a second; one that has measured nothing is taken for an average one."""
    if worker.prefill_tokens_per_s:
        return worker.prefill_tokens_per_s
    known = [other.prefill_tokens_per_s for other in fleet if other.prefill_tokens_per_s]
    return sum(known) / len(known) if known else 0.0


def _is_pressed(role: Role, pressures: Pressures, observed: Observed, settings: PlanSettings) -> bool:
    if pressures.of(role) > _high(role, settings):
        return True
    return pressures.of(role) > settings.least_load and _misses_level(role, observed, settings)


def _misses_level(role: Role, observed: Observed, settings: PlanSettings) -> bool:
    met, total = _level(role, observed)
    return total >= settings.least_samples and met < settings.attainment * total


def _level(role: Role, observed: Observed) -> tuple[int, int]:
    """How many of how many were in time."""
    return (observed.ttft_met, observed.ttft_count) if role == "prefill" else (observed.tpot_met, observed.tpot_count)


# -- the choice ----------------------------------------------------------------------------------------------------


def _best_move(gaining: Role, before: Pressures, observed: Observed, settings: PlanSettings) -> tuple[Move | None, str]:
    """The move that helps `gaining`, or None and why there is none."""
    giving: Role = "decode" if gaining == "prefill" else "prefill"
    reason = f"{gaining} is pressed: {before.of(gaining):.2f}"
    if before.of(gaining) <= _high(gaining, settings):
        met, total = _level(gaining, observed)
        reason += f" with {met} of {total} in time"
    donors = [worker for worker in observed.workers if worker.roles == (giving,) and worker.movable]
    if len(_with(observed.workers, giving)) < 2 or not donors:
        return None, f"{reason}, but no {giving} worker can be spared"
    donor = min(donors, key=_cost_of_leaving)
    after = _after(donor, gaining, observed, settings)
    if after.of(giving) > _low(giving, settings):
        return None, f"{reason}, but {giving} would be at {after.of(giving):.2f} without {donor.worker}"
    if _worst(after, settings) > (1 - settings.least_gain) * _worst(before, settings):
        return None, f"{reason}, but {donor.worker} would not help: {after.of(gaining):.2f}"
    reason += (
        f"; with {donor.worker} {after.of(gaining):.2f}, {giving} {before.of(giving):.2f} to {after.of(giving):.2f}"
    )
    return Move(worker=donor.worker, roles=(gaining,), expected=after), reason


def _cost_of_leaving(worker: WorkerLoad) -> tuple[int, int, int, str]:
    """Who has the least to finish goes first."""
    return worker.sequences, worker.queued_tokens, worker.used_blocks, worker.worker


def _after(donor: WorkerLoad, gaining: Role, observed: Observed, settings: PlanSettings) -> Pressures:
    """The pressures after the move. More prefill lets through what arrives and had to wait: decode grows by that."""
    workers = [replace(worker, roles=(gaining,)) if worker is donor else worker for worker in observed.workers]
    growth = 1.0
    if gaining == "prefill":
        rate = sum(_rate(worker, observed.workers) for worker in _with(observed.workers, "prefill"))
        more = sum(_rate(worker, observed.workers) for worker in _with(workers, "prefill"))
        growth = max(1.0, min(observed.arriving_tokens_per_s, more) / rate) if rate else 1.0
    return pressures_of(workers, observed, settings, growth=growth)


def _must_wait(now: float, gaining: Role, memory: Memory, settings: PlanSettings) -> str:
    """Why a good move is not made yet; "" when it is."""
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
    """Workers of each role that bring its pressure between its thresholds; as many as there are when it is there already."""
    desired: dict[Role, int] = {}
    for role in ROLES:
        count = len(_with(observed.workers, role))
        load = count * pressures.of(role)
        wanted = count
        if role in pressed:
            wanted = max(count + 1, math.ceil(load / _high(role, settings)))
        elif count > 1 and load / (count - 1) <= _low(role, settings):
            wanted = max(1, math.ceil(load / _low(role, settings)))
        desired[role] = max(wanted, 1 if role == "decode" else 0)  # nobody is served without
    return desired


def _with(workers: Iterable[WorkerLoad], role: Role) -> list[WorkerLoad]:
    return [worker for worker in workers if role in worker.roles]


def _high(role: Role, settings: PlanSettings) -> float:
    return settings.prefill_high if role == "prefill" else settings.decode_high


def _low(role: Role, settings: PlanSettings) -> float:
    return settings.prefill_low if role == "prefill" else settings.decode_low


def _worst(pressures: Pressures, settings: PlanSettings) -> float:
    """The larger pressure, each as a share of its upper threshold."""
    return max(pressures.of(role) / _high(role, settings) for role in ROLES)
