"""Placement while Redis is down: the least predicted wait, then the most free blocks.

A gateway then knows only heartbeats and its own requests: no prefixes, and no charges of other gateways.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.messages import WorkerState
from common.policy import placement_policy
from common.words import Role
from gateway.placement.ledger import room_for
from gateway.request.placement import Placement, Reason
from gateway.request.state import Phase, RequestState

UNMEASURED_TOKENS_PER_S = 1.0  # without measured rates, queues are compared by tokens


@dataclass(slots=True, kw_only=True)
class Load:
    """A worker with the load of this gateway's requests. The larger of both figures counts."""

    state: WorkerState
    prompt_tokens: int = 0
    sequences: int = 0
    reserved_tokens: int = 0

    @property
    def queued_tokens(self) -> int:
        return max(self.prompt_tokens, self.state.queued_tokens)

    @property
    def free_tokens(self) -> int:
        layout = self.state.region.layout
        return min(
            self.state.free_blocks * layout.block_size, layout.num_blocks * layout.block_size - self.reserved_tokens
        )

    def has_room(self, reserve_tokens: int) -> bool:
        running = self.state.running + self.state.waiting
        return max(self.sequences, running) < self.state.max_sequences and reserve_tokens <= self.free_tokens


def loads_of(workers: Iterable[WorkerState], requests: Iterable[RequestState]) -> list[Load]:
    """Each worker's load, by its heartbeat and by this gateway's requests in flight."""
    loads = {state.worker: Load(state=state) for state in workers}
    for request in requests:
        if request.is_over or not request.assigned:
            continue
        prefill = loads.get(request.assigned)
        if prefill is not None and request.phase in (Phase.QUEUED, Phase.CLAIMED):
            prefill.prompt_tokens += len(request.token_ids)
        decode = loads.get(request.decoder.worker if request.decoder else (request.candidates or [request.assigned])[0])
        if decode is not None:
            decode.sequences += 1
            decode.reserved_tokens += room_for(decode.state.region.layout, request.spec.num_tokens)
    return list(loads.values())


def choose(
    loads: Sequence[Load], *, num_tokens: int, reserve_tokens: int, cut_over_tokens: int, exclude: Sequence[str] = ()
) -> Placement:
    """Choose workers. There must be a decode worker; excluded ones are a last resort."""
    allowed = [load for load in loads if load.state.worker not in exclude]
    if not _with_role(allowed, "decode"):
        allowed = list(loads)
    decode = sorted(
        _with_role(allowed, "decode"),
        key=lambda load: (not load.has_room(reserve_tokens), -load.free_tokens, load.state.worker),
    )
    prefill, best = _with_role(allowed, "prefill"), decode[0].state
    if not prefill:
        return Placement(prefill=best.worker, decode=[], reason=Reason.HEARTBEATS_LOCAL_NO_PREFILL)
    if num_tokens <= cut_over_tokens:
        return Placement(prefill=best.worker, decode=[], reason=Reason.HEARTBEATS_LOCAL_SHORT)
    first = _least_wait(prefill, num_tokens)
    if first is best:
        return Placement(prefill=best.worker, decode=[], reason=Reason.HEARTBEATS_LOCAL_SAME_WORKER)
    reason = Reason.HEARTBEATS_LOAD if decode[0].has_room(reserve_tokens) else Reason.HEARTBEATS_FULL
    return Placement(prefill=first.worker, decode=_listed(decode, first), reason=reason)


def _with_role(loads: Iterable[Load], role: str) -> list[Load]:
    return [load for load in loads if role in load.state.roles]


def _listed(decode: Sequence[Load], first: WorkerState) -> list[str]:
    """The candidates. A prefill worker that also decodes always is one: its own KV is there, even if all are full."""
    names = [load.state.worker for load in decode[: int(placement_policy()["candidates"]["decode_listed"])]]
    if Role.DECODE in first.roles and first.worker not in names:
        names[-1] = first.worker
    return names


def _least_wait(loads: Sequence[Load], num_tokens: int) -> WorkerState:
    """The worker that would compute the prompt first; unmeasured ones count as the slowest."""
    slowest = min(
        (rate for load in loads if (rate := load.state.prefill_tokens_per_s)), default=UNMEASURED_TOKENS_PER_S
    )

    def wait_s(load: Load) -> float:
        return (load.queued_tokens + num_tokens) / (load.state.prefill_tokens_per_s or slowest)

    return min(loads, key=lambda load: (wait_s(load), load.state.worker)).state
