"""Ways to use two cards better, on workers by hand."""

from __future__ import annotations

from benchmarks.simulate.fleet import TOKEN_BUDGET, Run, Worker
from benchmarks.simulate.run import Simulation
from benchmarks.simulate.trace import TRACE_BLOCK, TraceRequest
from benchmarks.simulate.two_cards import ANY_NUMBER, pushed_prefix, replicas, turns_stay


def a_run(name: str, *, blocks: int, tokens: int) -> Run:
    digests = tuple(b"block-%d" % at for at in range(blocks))
    return Run(id=name, request=TraceRequest(0.0, tokens, 10, digests))


def hold(worker: Worker, run: Run, *, blocks: int) -> None:
    """Let the worker's cache have the run's first blocks."""
    taken = worker.pool.allocate(blocks)
    for block, digest in zip(taken, run.request.blocks, strict=False):
        worker.pool.publish(block, digest)
    worker.pool.release(taken)


def test_a_turn_stays_with_the_decoder_of_the_one_before() -> None:
    prefill, decode = Worker("p0", "prefill"), Worker("d0", "decode")
    cut_over, run = turns_stay([prefill, decode]), a_run("r", blocks=4, tokens=4 * TRACE_BLOCK + 100)
    hold(prefill, run, blocks=4)
    hold(decode, run, blocks=2)
    assert cut_over(run) == -1  # less than half
    hold(decode, run, blocks=3)
    assert cut_over(run) == ANY_NUMBER


def test_a_prefix_is_where_it_is_wanted() -> None:
    here, there = Worker("b0", "prefill", "decode"), Worker("b1", "prefill", "decode")
    run = a_run("r", blocks=4, tokens=4 * TRACE_BLOCK + 100)
    hold(here, run, blocks=1)
    hold(there, run, blocks=3)
    run.prefill = here
    before = here.pool.num_free
    pushed_prefix([here, there])(run)
    assert (here.cached_blocks(run), here.pool.num_free) == (3, before)


def test_replicas_share_requests_and_compute_prompts_within_a_fixed_budget() -> None:
    workers = [Worker(name, "prefill", "decode") for name in ("b0", "b1")]
    rule = replicas(workers)
    assert {worker.tokens_beside(10**6) for worker in workers} == {TOKEN_BUDGET}
    requests = [TraceRequest(0.0, 1000, 10, ()) for _ in range(4)]
    outcome = Simulation(requests, workers, rule).run()
    assert sorted(run.prefill.name for run in outcome.runs if run.prefill) == ["b0", "b0", "b1", "b1"]
    assert all(not run.decode for run in outcome.runs)
