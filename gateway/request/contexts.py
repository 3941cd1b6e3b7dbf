"""Context lengths of workers: the longest sequence that each one accepts.

One with a short context costs nobody else's requests: it gets those that fit.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.messages import WorkerState


def context_of(worker: WorkerState) -> int:
    """A worker's context length, which its pool holds."""
    layout = worker.region.layout
    return min(worker.max_model_len, layout.num_blocks * layout.block_size)


def longest(decode: Iterable[WorkerState]) -> int | None:
    """The longest context length of the decode workers; None without any."""
    return max(map(context_of, decode), default=None)


def cut_by_its_pool(decode: Iterable[WorkerState]) -> WorkerState | None:
    """The decode worker with the longest context, if its pool holds less than the model's; None if no pool limits it."""
    longest_of = max(decode, key=context_of, default=None)
    return longest_of if longest_of is not None and context_of(longest_of) < longest_of.whole_len else None


def usual(decode: Iterable[WorkerState]) -> int | None:
    """The context for answers without a requested length; None without a decode worker.

    The shortest one of at least half of what half of the workers have: one long context doesn't draw all such answers to its
    worker, one short context cuts none of them.
    """
    lengths = sorted(map(context_of, decode), reverse=True)
    if not lengths:
        return None
    half_have = lengths[(len(lengths) - 1) // 2]
    return min(length for length in lengths if 2 * length >= half_have)


def long_enough(workers: Iterable[WorkerState], num_tokens: int) -> list[WorkerState]:
    """Workers that accept a sequence of so many tokens."""
    return [worker for worker in workers if context_of(worker) >= num_tokens]
