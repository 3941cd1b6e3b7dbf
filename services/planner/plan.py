"""Which worker should change its role: a pure function of what was observed and of what it remembers. No I/O, no clock.

Two pressures describe a fleet, each as a share of what its workers can do; above 1 work piles up.

    prefill   (prompt tokens that arrive in the horizon + those that wait) / tokens that the prefill workers compute in it
    decode    the largest of: sequences / room for sequences, KV blocks in use / KV blocks, and the time of a step by the model
              (what the batch adds to it is shared by the decode workers, the rest is not) / longest time per token that is good

While first tokens are in time, prompts that are computed within the horizon don't count as waiting.

A role is *pressed* above its upper threshold, or above `least_load` when too few requests meet its service level (time to
first token: prefill, time per token: decode). A pressed role gets a worker of the other one when all of this holds:

- the other role is not pressed, and stays under its own lower threshold without that worker, with what the move adds to it;
- the larger pressure falls by at least `least_gain`;
- this was so for `hold_s` without a break; the last move is `cooldown_s` ago, and one the other way `reverse_s`;
- the worker is not the last of its role;
- it is not a decode worker while too few requests have their tokens in time, whatever the pressure.

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
LEAST_OWN_SHARE = 0.25  # of a step: what it takes beside reading the context, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Thresholds are shares of capacity, times seconds."""

    horizon_s: float = 1.0  # waiting prompts should be computed within this: the service level of the first token
    hold_s: float = 10.0  # for so long a role must be pressed
    cooldown_s: float = 30.0  # between two moves
    reverse_s: float = 60.0  # between a move and one the other way
    prefill_high: float = 0.9  # pressed above this
    prefill_low: float = 0.6  # what a prefill worker's leaving may bring the others to
    decode_high: float = 0.85
    decode_low: float = 0.6
    step_level_ms: float = 50.0  # a decode step that takes longer misses the service level of the time per token
    least_load: float = 0.5  # below this pressure a missed service level is not the number of workers' fault
    least_gain: float = 0.05  # by which share the larger pressure must fall
    attainment: float = 0.95  # share of requests that should meet a service level
    least_samples: int = 10  # fewer say nothing about a service level

    def __post_init__(self) -> None:
        if not (0 < self.prefill_low < self.prefill_high and 0 < self.decode_low < self.decode_high):
            raise ValueError("each low threshold must be above 0 and below its high one, or roles would go to and fro")
        if self.step_level_ms <= 0:
            raise ValueError(f"step_level_ms must be above 0, it is {self.step_level_ms:g}")


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
    decode_step_ms: float = 0.0  # a pass of its batch without prompts
    block_read_ms: float = 0.0  # what a used block adds to a step, more or less
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
    waiting = sum(worker.queued_tokens for worker in observed.workers)
    if not _waits_for_decode(observed, settings):
        waiting += observed.unclaimed_tokens
    tokens = observed.arriving_tokens_per_s + waiting / settings.horizon_s
    if waiting <= rate * settings.horizon_s and _first_tokens_are_in_time(observed, settings):
        tokens = observed.arriving_tokens_per_s
    step = steps_of(observed).on(len(decode), growth) / settings.step_level_ms
    return Pressures(prefill=tokens / rate if rate else 0.0, decode=max(_occupancy(decode, observed, growth), step))


def _occupancy(decode: Sequence[WorkerLoad], observed: Observed, growth: float) -> float:
    """The load of all that decode today, put on the workers `decode`."""
    today = _with(observed.workers, "decode")
    sequences = sum(worker.sequences for worker in today) + observed.handing_over
    blocks = sum(worker.used_blocks for worker in today)
    room_sequences = sum(worker.max_sequences for worker in decode)
    room_blocks = sum(worker.num_blocks for worker in decode)
    return growth * max(sequences / max(room_sequences, 1), blocks / max(room_blocks, 1))


@dataclass(frozen=True, slots=True)
class Steps:
    """How long a decode step takes, by the number of workers that share the batch. Both 0: nobody has measured one."""

    own_ms: float  # a worker's, whatever its batch
    shared_ms: float  # added by the sequences of all, if one worker had them

    def on(self, workers: int, growth: float = 1.0) -> float:
        """ms on each of `workers`; `growth`: of the sequences."""
        return self.own_ms + growth * self.shared_ms / max(workers, 1)

    def workers_for(self, step_ms: float) -> int:
        """The fewest workers whose steps take at most `step_ms`; 0 when no number of them would do."""
        spare_ms = step_ms - self.own_ms
        return max(1, math.ceil(self.shared_ms / spare_ms)) if spare_ms > 0 else 0


def steps_of(observed: Observed) -> Steps:
    """From the steps that workers measured with the batch that they have; requests on their way to one count as well.

    As in placement, a full batch without context doubles the step of one sequence, and context adds the time to read it.
    """
    decode = _with(observed.workers, "decode")
    measured = [worker for worker in decode if worker.decode_step_ms > 0 and worker.sequences > 0]
    if not measured:
        return Steps(0.0, 0.0)
    own = [_own_step_ms(worker) for worker in measured]
    shared = sum(worker.decode_step_ms - ms for worker, ms in zip(measured, own, strict=True))
    coming = sum(worker.sequences for worker in decode) + observed.handing_over
    return Steps(sum(own) / len(own), shared * coming / sum(worker.sequences for worker in measured))


def _own_step_ms(worker: WorkerLoad) -> float:
    """What is left of a step without its sequences; at least a part of it, as reading may take less than is thought."""
    step_ms = worker.decode_step_ms
    rest = max(step_ms - worker.used_blocks * worker.block_read_ms, LEAST_OWN_SHARE * step_ms)
    return rest / (1 + worker.sequences / max(worker.max_sequences, 1))


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


def _first_tokens_are_in_time(observed: Observed, settings: PlanSettings) -> bool:
    """This is known: a queue that is computed within the horizon is then no need."""
    return observed.ttft_count >= settings.least_samples and not _misses_level("prefill", observed, settings)


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
    if giving == "decode" and _misses_level("decode", observed, settings):
        return None, f"{reason}, but decode has {observed.tpot_met} of {observed.tpot_count} in time"
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
    """Workers of each role that bring its pressure between its thresholds; as many as there are when it is there already.

    More decode workers are asked for by the time of a step only as far as they would shorten it. Without prompts for prefill
    workers none is needed: an autoscaler may take the last one away. Without a decode worker nobody is served.
    """
    desired: dict[Role, int] = {}
    for role in ROLES:
        count = len(_with(observed.workers, role))
        least = 1 if role == "decode" or (count and _prompts_come(observed)) else 0
        wanted = count
        if role in pressed:
            more = count + 1 if role == "prefill" or _more_decode_helps(observed, settings) else count
            wanted = max(more, _enough(role, _high(role, settings), pressures, observed, settings))
        elif (fewer := _enough(role, _low(role, settings), pressures, observed, settings)) < count:
            wanted = fewer
        desired[role] = max(wanted, least)
    return desired


def _prompts_come(observed: Observed) -> bool:
    waiting = observed.unclaimed_tokens + sum(worker.queued_tokens for worker in observed.workers)
    return waiting > 0 or observed.arriving_tokens_per_s > 0


def _enough(role: Role, share: float, pressures: Pressures, observed: Observed, settings: PlanSettings) -> int:
    """The fewest workers under whom the role's pressure is at most `share`; a step that none of them shorten is left out."""
    workers = _with(observed.workers, role)
    if role == "prefill":
        return math.ceil(len(workers) * pressures.prefill / share)
    by_step = steps_of(observed).workers_for(share * settings.step_level_ms) or len(workers)
    return max(math.ceil(len(workers) * _occupancy(workers, observed, 1.0) / share), by_step)


def _more_decode_helps(observed: Observed, settings: PlanSettings) -> bool:
    """Not if steps are long without a batch: that many workers more would change nothing."""
    decode = _with(observed.workers, "decode")
    steps = steps_of(observed)
    by_room = _occupancy(decode, observed, 1.0) * settings.step_level_ms >= steps.on(len(decode))
    return by_room or steps.shared_ms >= settings.least_gain * len(decode) * steps.on(len(decode))


def _with(workers: Iterable[WorkerLoad], role: Role) -> list[WorkerLoad]:
    return [worker for worker in workers if role in worker.roles]


def _high(role: Role, settings: PlanSettings) -> float:
    return settings.prefill_high if role == "prefill" else settings.decode_high


def _low(role: Role, settings: PlanSettings) -> float:
    return settings.prefill_low if role == "prefill" else settings.decode_low


def _worst(pressures: Pressures, settings: PlanSettings) -> float:
    """The larger pressure, each as a share of its upper threshold."""
    return max(pressures.of(role) / _high(role, settings) for role in ROLES)
