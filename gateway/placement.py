"""Placement without Redis: a pure choice from the heartbeats that this gateway heard itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from common.blocks import hash_blocks, hash_root
from common.messages import WorkerState


def choose_locally(
    prefill: Sequence[WorkerState], decode: Sequence[WorkerState], *, queued: Mapping[str, int], exclude: Sequence[str]
) -> tuple[str, list[str], str]:
    """Return (worker that prefills, decode candidates, reason): the least loaded, by what they say and what we sent them.

    Candidates are empty when the prefill worker decodes as well. `decode` must not be empty.
    """

    def load(state: WorkerState) -> tuple[int, int, str]:
        return (queued.get(state.worker, 0) + state.running + state.waiting, state.queued_tokens, state.worker)

    def allowed(states: Sequence[WorkerState]) -> list[WorkerState]:
        return sorted([state for state in states if state.worker not in exclude] or states, key=load)

    decoders = [state.worker for state in allowed(decode)]
    prefillers = [state.worker for state in allowed(prefill)]
    if not prefillers:
        return decoders[0], [], "without redis: local, no prefill worker"
    if prefillers[0] == decoders[0]:
        return prefillers[0], [], "without redis: same worker"
    return prefillers[0], decoders[:4], "without redis: load"


def compatible(state: WorkerState) -> bool:
    """Whether the worker hashes blocks as this gateway does (the parity probe); "" of an older one is not asked."""
    layout = state.region.layout
    return not state.parity_hash or state.parity_hash == _probe_hash(
        state.model_fingerprint, layout.dtype, layout.block_size
    )


@lru_cache(maxsize=64)
def _probe_hash(fingerprint: str, dtype: str, block_size: int) -> bytes:
    root = hash_root(model=fingerprint, kv_dtype=dtype, block_size=block_size)
    return hash_blocks(root, range(2 * block_size), block_size)[-1]
