"""One worker of both roles under load.

python -m benchmarks.load --model                   the loads on a modelled worker, no GPU, beside vLLM's scheduling
python -m benchmarks.load --model --step-target-ms 0 --cell "long prompts x0.8" --traces DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.load.cells import CELLS, TRACE
from benchmarks.load.model import Outcome, Policy, serve
from benchmarks.load.policies import baton
from benchmarks.load.vllm import vllm


def main() -> None:
    arguments = _arguments()
    policies = [*map(baton, arguments.step_target_ms or [None]), vllm()]
    print("| load | policy | TTFT p50 / p90 / p99 ms | TPOT p50 / p90 / p99 ms | good | req/s | preempted |")
    print("|---|---|---|---|--:|--:|--:|")
    for cell in CELLS:
        if arguments.cell in ("", cell.name):
            for policy in policies:
                outcome = serve(cell, policy, seconds=arguments.seconds or cell.seconds, traces=arguments.traces)
                print(_row(cell.name, policy, outcome), flush=True)


def _row(name: str, policy: Policy, outcome: Outcome) -> str:
    ttft, tpot = (
        " / ".join(f"{of(quantile):,.{digits}f}" for quantile in (0.5, 0.9, 0.99))
        for of, digits in ((outcome.ttft_ms, 0), (outcome.tpot_ms, 1))
    )
    return (
        f"| {name} | {policy.name} | {ttft} | {tpot} | {outcome.good:.2f} | {outcome.per_second:.2f} "
        f"| {outcome.preemptions} |"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="store_true", required=True, help="a modelled worker in simulated time")
    parser.add_argument("--cell", default="", help="one load alone, by its name")
    parser.add_argument("--seconds", type=float, help="of arrivals")
    parser.add_argument("--traces", type=Path, help=f"folder with {TRACE}; without it long prompts are made up")
    parser.add_argument("--step-target-ms", type=float, action="append", help="may be repeated; 0 = no bound")
    return parser.parse_args()


if __name__ == "__main__":
    main()
