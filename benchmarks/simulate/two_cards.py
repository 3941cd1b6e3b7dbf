"""Ways to use few cards better, tried beside placement as it is (docs/placement.md has what came of them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.simulate.fleet import Run, Worker
from benchmarks.simulate.policies import CutOver, Rule, by_costs
from benchmarks.simulate.trace import TRACE_BLOCK

ANY_NUMBER = 10**9
OWN_SHARE = 0.5  # a decode worker that holds so much of a prompt decoded the session's turn before
QUEUED_WEIGHT = 4  # of a waiting request against a running one


def turns_stay(workers: Sequence[Worker]) -> CutOver:
    """A session's next turn is computed where its KV is decoded, whatever it costs there; others by costs."""
    decoders = [worker for worker in workers if "decode" in worker.roles]

    def cut_over(run: Run) -> int:
        held = max(worker.cached_blocks(run) for worker in decoders) * TRACE_BLOCK
        return ANY_NUMBER if held > OWN_SHARE * run.request.prompt_tokens else by_costs(run)

    return cut_over


def pushed_prefix(workers: Sequence[Worker]) -> Callable[[Run], None]:
    """A prefix that any worker holds is at the chosen one when it begins: an upper bound, as the copy takes no time."""

    def placed(run: Run) -> None:
        target = run.prefill
        assert target is not None
        known = run.request.blocks[: max(worker.cached_blocks(run) for worker in workers)]
        held = target.pool.match_prefix(known)
        if (missing := len(known) - len(held)) and missing <= target.pool.num_free:
            fresh = target.pool.allocate(missing)
            for block, digest in zip(fresh, known[len(held) :], strict=True):
                target.pool.publish(block, digest)
            held += fresh
        target.pool.release(held)

    return placed


def replicas(workers: Sequence[Worker]) -> Rule:
    """vLLM's two replicas behind a balancer: passes of a fixed budget, each request where fewest run and wait."""
    for worker in workers:
        worker.has_fixed_budget = True
    return Rule(
        "vLLM's replicas",
        workers,
        lambda both, run, placed: min(both, key=lambda worker: (_requests(worker), worker.name)),
        lambda decode, run, placed: [],
    )


def _requests(worker: Worker) -> int:
    return QUEUED_WEIGHT * (len(worker.prompts) + len(worker.waiting)) + len(worker.batch)
