"""The planner's observations: each worker's load, the gateways' arrivals and service levels. Values, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import msgspec

from common.messages import GatewayState, ModelLevels, WorkerState
from common.policy import kv_read_bytes_per_s
from common.words import Role

ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The load of one worker that takes new work. A rate of 0 is not measured yet."""

    worker: str
    roles: tuple[Role, ...]
    sequences: int = 0  # running, or waiting to join its batch
    max_sequences: int = 1
    used_blocks: int = 0  # KV blocks that can't be evicted
    num_blocks: int = 1
    queued_tokens: int = 0  # prompt tokens claimed and not computed
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0  # a pass of its batch without prompts
    block_read_ms: float = 0.0  # estimate of the time that a used block adds to a step
    movable: bool = True  # False: it refused to change its roles


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The fleet at one instant. Service-level counts cover a recent window and all gateways."""

    workers: tuple[WorkerLoad, ...]
    num_models: int = 1  # different weights among these workers, which have one model
    is_sum: bool = False  # a gateway tells the load of several models as one sum
    unclaimed_tokens: int = 0  # prompt tokens not claimed yet
    handing_over: int = 0  # requests that have a first token and no decode worker yet
    arriving_tokens_per_s: float = 0.0  # prompt tokens for prefill workers
    ttft_met: int = 0
    ttft_count: int = 0
    tpot_met: int = 0
    tpot_count: int = 0


def observe(
    workers: Iterable[WorkerState], gateways: Collection[GatewayState], *, refused: Collection[tuple[str, int]]
) -> Observed:
    """Turn heartbeats into an observation; `refused`: workers (id, incarnation) that refused to change roles."""

    states = list(workers)

    def total(name: str) -> float:
        return sum(getattr(state, name) for state in gateways)

    return Observed(
        workers=tuple(load_of(state, movable=(state.worker, state.incarnation) not in refused) for state in states),
        num_models=max(1, len({state.model_fingerprint for state in states})),
        unclaimed_tokens=int(total("queued_tokens")),
        handing_over=int(total("handing_over")),
        arriving_tokens_per_s=total("arriving_tokens_per_s"),
        ttft_met=int(total("ttft_met")),
        ttft_count=int(total("ttft_count")),
        tpot_met=int(total("tpot_met")),
        tpot_count=int(total("tpot_count")),
    )


def observe_models(
    workers: Iterable[WorkerState], gateways: Collection[GatewayState], *, refused: Collection[tuple[str, int]]
) -> dict[str, Observed]:
    """An observation for each model, by the workers' name of it; "" alone without workers.

    Gateways of older releases tell one sum, which is taken where there is a single model.
    """
    of_model: dict[str, list[WorkerState]] = {}
    for state in workers:
        of_model.setdefault(state.model, []).append(state)
    if len(of_model) <= 1:
        return {name: observe(states, gateways, refused=refused) for name, states in of_model.items()} or {
            "": observe([], gateways, refused=refused)
        }
    is_sum = any(not state.levels and (state.ttft_count or state.queued_tokens) for state in gateways)
    found: dict[str, Observed] = {}
    for name, states in of_model.items():
        parts = [
            msgspec.structs.replace(state, **msgspec.structs.asdict(state.levels.get(name, ModelLevels())))
            for state in gateways
        ]
        found[name] = replace(observe(states, parts, refused=refused), is_sum=is_sum)
    return found


def load_of(state: WorkerState, *, movable: bool) -> WorkerLoad:
    """The load of one heartbeat. Only a decode worker's batch and a prefill worker's prompts count; the rest is draining."""
    layout = state.region.layout
    decodes = Role.DECODE in state.roles
    return WorkerLoad(
        worker=state.worker,
        roles=tuple(role for role in ROLES if role in state.roles),
        sequences=state.running + state.waiting if decodes else 0,
        max_sequences=state.max_sequences,
        used_blocks=layout.num_blocks - state.free_blocks,
        num_blocks=layout.num_blocks,
        queued_tokens=state.queued_tokens if Role.PREFILL in state.roles else 0,
        prefill_tokens_per_s=state.prefill_tokens_per_s,
        decode_step_ms=state.decode_step_ms if decodes else 0.0,
        block_read_ms=1000 * layout.block_bytes / kv_read_bytes_per_s(),
        movable=movable,
    )


def with_role(workers: Iterable[WorkerLoad], role: Role) -> list[WorkerLoad]:
    """Workers that have the role, alone or among others."""
    return [worker for worker in workers if role in worker.roles]
