"""Two pressures describe a fleet, each as a share of capacity; above 1 work accumulates.

    prefill   (prompt tokens that arrive in the horizon + waiting ones) / tokens that the prefill workers compute in it
    decode    the largest of: sequences / places for them; KV blocks in use / KV blocks; predicted step / longest good step

Part of a step is each worker's own; the rest grows with the batch, which decode workers share. While first tokens are in
time, prompts that are computed within the horizon do not count as waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.words import Role
from planner.observed import Observed, WorkerLoad, with_role
from planner.settings import PlanSettings

MIN_OWN_STEP_SHARE = 0.25  # minimum share of a step that is not reading context


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressures:
    """Both pressures, as shares of capacity."""

    prefill: float
    decode: float

    def of(self, role: Role) -> float:
        return self.prefill if role == Role.PREFILL else self.decode


def pressures_of(
    workers: Sequence[WorkerLoad], observed: Observed, settings: PlanSettings, *, growth: float = 1.0
) -> Pressures:
    """Pressures if the fleet were `workers`, under the observed load. `growth` scales decoding."""
    prefill, decode = with_role(workers, Role.PREFILL), with_role(workers, Role.DECODE)
    rate = sum(rate_of(worker, observed.workers) for worker in prefill)
    waiting = sum(worker.queued_tokens for worker in observed.workers)
    if not _waits_for_decode(observed, settings):
        waiting += observed.unclaimed_tokens
    tokens = observed.arriving_tokens_per_s + waiting / settings.horizon_s
    if waiting <= rate * settings.horizon_s and _first_tokens_are_in_time(observed, settings):
        tokens = observed.arriving_tokens_per_s
    step = steps_of(observed).on(len(decode), growth) / settings.step_level_ms
    return Pressures(prefill=tokens / rate if rate else 0.0, decode=max(occupancy(decode, observed, growth), step))


def occupancy(decode: Sequence[WorkerLoad], observed: Observed, growth: float) -> float:
    """Share of batch slots or blocks in use if the present decode load were on `decode`."""
    today = with_role(observed.workers, Role.DECODE)
    sequences = sum(worker.sequences for worker in today) + observed.handing_over
    blocks = sum(worker.used_blocks for worker in today)
    room_sequences = sum(worker.max_sequences for worker in decode)
    room_blocks = sum(worker.num_blocks for worker in decode)
    return growth * max(sequences / max(room_sequences, 1), blocks / max(room_blocks, 1))


@dataclass(frozen=True, slots=True)
class Steps:
    """The duration of a decode step when workers share the batch. Both 0: not measured."""

    own_ms: float  # each worker's own part, whatever its batch
    shared_ms: float  # added by all sequences of one worker

    def on(self, workers: int, growth: float = 1.0) -> float:
        """The step in ms on each of `workers`. `growth` scales the sequences."""
        return self.own_ms + growth * self.shared_ms / max(workers, 1)

    def workers_for(self, step_ms: float) -> int:
        """The fewest workers whose steps take at most `step_ms`; 0 when no number suffices."""
        spare_ms = step_ms - self.own_ms
        return max(1, math.ceil(self.shared_ms / spare_ms)) if spare_ms > 0 else 0


def steps_of(observed: Observed) -> Steps:
    """Split the measured steps into both parts. Requests on their way to a worker count, too.

    As in placement, a full batch doubles the step of one sequence, and context adds the time to read it.
    """
    decode = with_role(observed.workers, Role.DECODE)
    measured = [worker for worker in decode if worker.decode_step_ms > 0 and worker.sequences > 0]
    if not measured:
        return Steps(0.0, 0.0)
    own = [_own_step_ms(worker) for worker in measured]
    shared = sum(worker.decode_step_ms - ms for worker, ms in zip(measured, own, strict=True))
    coming = sum(worker.sequences for worker in decode) + observed.handing_over
    return Steps(sum(own) / len(own), shared * coming / sum(worker.sequences for worker in measured))


def _own_step_ms(worker: WorkerLoad) -> float:
    """The part of a step that does not depend on its sequences, with a lower bound: the read time may be overestimated."""
    step_ms = worker.decode_step_ms
    rest = max(step_ms - worker.used_blocks * worker.block_read_ms, MIN_OWN_STEP_SHARE * step_ms)
    return rest / (1 + worker.sequences / max(worker.max_sequences, 1))


def _waits_for_decode(observed: Observed, settings: PlanSettings) -> bool:
    """True if prefill workers hold finished prompts because decode is full. Their queues then say nothing about prefill."""
    full = occupancy(with_role(observed.workers, Role.DECODE), observed, 1.0) > settings.decode.high
    return full and observed.handing_over > 0


def rate_of(worker: WorkerLoad, fleet: Iterable[WorkerLoad]) -> float:
    """Prompt tokens a second. A worker without a measurement counts as average."""
    if worker.prefill_tokens_per_s:
        return worker.prefill_tokens_per_s
    known = [other.prefill_tokens_per_s for other in fleet if other.prefill_tokens_per_s]
    return sum(known) / len(known) if known else 0.0


def misses_level(role: Role, observed: Observed, settings: PlanSettings) -> bool:
    met, total = level(role, observed)
    return total >= settings.least_samples and met < settings.attainment * total


def level(role: Role, observed: Observed) -> tuple[int, int]:
    """Requests in time, and all of them."""
    return (
        (observed.ttft_met, observed.ttft_count) if role == Role.PREFILL else (observed.tpot_met, observed.tpot_count)
    )


def _first_tokens_are_in_time(observed: Observed, settings: PlanSettings) -> bool:
    """True if enough requests met their TTFT. A queue that is computed within the horizon then needs no more workers."""
    return observed.ttft_count >= settings.least_samples and not misses_level(Role.PREFILL, observed, settings)
