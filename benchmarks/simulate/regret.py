"""Regret of a placement: how much later its first token comes than it would from the best worker.

Both times come from the workers' true state at that instant: their caches, what is left of their prompts, their batches.
Neither knows the future: prompts are computed in their order, and a batch is taken to stay as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.simulate.costs import LOCAL_SLOWDOWN, PREFILL_FIXED_MS, Chunk
from benchmarks.simulate.fleet import Run, Worker
from benchmarks.simulate.trace import TRACE_BLOCK, TraceRequest


def regret_ms(run: Run, workers: Iterable[Worker], now_ms: float) -> float:
    """Regret in ms, 0 or more. The run must not be in the worker's queue yet."""
    assert run.prefill is not None
    chosen = first_token_ms(run.prefill, run, now_ms)
    best = min(
        first_token_ms(worker, run, now_ms)
        for worker in workers
        if worker is run.prefill or "prefill" in worker.roles or worker.has_room(run)
    )
    return max(0.0, chosen - best)


def first_token_ms(worker: Worker, run: Run, now_ms: float) -> float:
    """Time until `worker` has computed the run's prompt, after all that it has to compute before."""
    coming, total_ms, backlog = set[bytes](), 0.0, worker.backlog_tokens
    for ahead in (*worker.prompts, run):
        left_ms, tokens, token_ms = _left(worker, ahead, coming, now_ms)
        total_ms += _beside_ms(worker, left_ms, token_ms, backlog)
        backlog = max(0, backlog - tokens)
        coming.update(ahead.request.blocks)
    return total_ms


def _left(worker: Worker, run: Run, coming: set[bytes], now_ms: float) -> tuple[float, int, float]:
    """The rest of a prompt: ms in passes of its own, its tokens, and ms a token."""
    if worker.prompts and run is worker.prompts[0] and (left_ms := worker.left_ms(now_ms)) is not None:
        return left_ms, run.uncached, Chunk(run.cached_tokens, run.uncached).work_ms / run.uncached
    cached = min(_matched(worker, run.request, coming) * TRACE_BLOCK, run.request.prompt_tokens - 1)
    chunk = Chunk(cached, run.request.prompt_tokens - cached)
    return PREFILL_FIXED_MS + chunk.work_ms, chunk.new, chunk.work_ms / chunk.new


def _matched(worker: Worker, request: TraceRequest, coming: set[bytes]) -> int:
    """Leading blocks that will be cached when its turn comes."""
    there = worker.pool.count_prefix(request.blocks)
    while there < len(request.blocks) and request.blocks[there] in coming:
        there += 1
    return there


def _beside_ms(worker: Worker, work_ms: float, token_ms: float, backlog: int) -> float:
    """The time of a prompt's work in passes that it shares with the batch."""
    if not worker.batch:
        return work_ms
    a_pass_ms = worker.tokens_beside(backlog) * token_ms
    return work_ms * (worker.step_ms + a_pass_ms * LOCAL_SLOWDOWN) / a_pass_ms
