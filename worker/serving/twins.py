"""Prompts that begin alike and come together, as the choices of one request do: one computes, the others find its blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from engine.cache.block_pool import BlockPool
from engine.sequence import Sequence
from worker.serving.allocation import digests_of

# In tokens: fewer cost a pass less than waiting for another one does.
LEAST_SHARED = 512


def awaits_twin(pool: BlockPool, sequence: Sequence, computing: Iterable[Sequence]) -> bool:
    """True while another prompt computes at least half of what this one, which has no blocks, would, and enough to pay.

    `computing`: admitted prompts, ahead of this one.
    """
    if sequence.scores_prompt or sequence.is_suspect:
        return False
    return any(_is_twin(pool, sequence, other) for other in computing if not other.is_suspect)


def _is_twin(pool: BlockPool, sequence: Sequence, other: Sequence) -> bool:
    shared = _num_alike(digests_of(pool, sequence), other.known_digests) * pool.block_size
    found, length = other.num_cached, len(sequence.token_ids)
    return other.num_computed < shared and shared - found >= max(LEAST_SHARED, (length - found) // 2)


def _num_alike(one: list[bytes], other: list[bytes]) -> int:
    """Leading blocks that are alike; a block's digest tells those before it."""
    return bisect_left(range(min(len(one), len(other))), 1, key=lambda at: one[at] != other[at])
