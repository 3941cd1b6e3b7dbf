"""One worker of both roles under load.

python -m benchmarks.load --model                   the loads on a modelled worker, no GPU, beside vLLM's scheduling
python -m benchmarks.load --url http://127.0.0.1:8000 --name M --device bf16       the same loads to a server, from outside
python -m benchmarks.load --model --step-target-ms 0 --cell "long prompts x0.8" --traces DIR
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from benchmarks.load.cells import CELLS, TRACE
from benchmarks.load.client import send
from benchmarks.load.model import Outcome, serve
from benchmarks.load.policies import baton
from benchmarks.load.vllm import vllm


def main() -> None:
    arguments = _arguments()
    if arguments.url:
        asyncio.run(_send(arguments))
        return
    policies = [*map(baton, arguments.step_target_ms or [None]), vllm()]
    print("| load | policy | TTFT p50 / p90 / p99 ms | TPOT p50 / p90 / p99 ms | good | req/s | preempted |")
    print("|---|---|---|---|--:|--:|--:|")
    for cell in CELLS:
        if arguments.cell in ("", cell.name):
            for policy in policies:
                outcome = serve(cell, policy, seconds=arguments.seconds or cell.seconds, traces=arguments.traces)
                print(_row(cell.name, policy.name, outcome), flush=True)


async def _send(arguments: argparse.Namespace) -> None:
    """Send the loads to a server, one after the other."""
    print("| load | server | TTFT p50 / p90 / p99 ms | TPOT p50 / p90 / p99 ms | good | req/s | preempted |")
    print("|---|---|---|---|--:|--:|--:|")
    for cell in CELLS:
        if arguments.cell in (cell.name, "") and arguments.device in (cell.device, ""):
            outcome = await send(
                cell,
                arguments.url,
                arguments.name,
                seconds=arguments.seconds or cell.seconds,
                traces=arguments.traces,
                vocabulary=arguments.vocabulary,
            )
            print(_row(cell.name, arguments.url, outcome), flush=True)


def _row(name: str, policy: str, outcome: Outcome) -> str:
    ttft, tpot = (
        " / ".join(f"{of(quantile):,.{digits}f}" for quantile in (0.5, 0.9, 0.99))
        for of, digits in ((outcome.ttft_ms, 0), (outcome.tpot_ms, 1))
    )
    return (
        f"| {name} | {policy} | {ttft} | {tpot} | {outcome.good:.2f} | {outcome.per_second:.2f} "
        f"| {outcome.preemptions} |"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", action="store_true", help="a modelled worker in simulated time")
    where.add_argument("--url", default="", help="a server that runs: Baton, or another with /v1/completions")
    parser.add_argument("--name", default="", help="the model's name at the server")
    parser.add_argument("--device", default="", choices=["", "bf16", "fp8"], help="the loads of one format alone")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="prompts have token ids below it")
    parser.add_argument("--cell", default="", help="one load alone, by its name")
    parser.add_argument("--seconds", type=float, help="of arrivals")
    parser.add_argument("--traces", type=Path, help=f"folder with {TRACE}; without it long prompts are made up")
    parser.add_argument("--step-target-ms", type=float, action="append", help="may be repeated; 0 = no bound")
    return parser.parse_args()


if __name__ == "__main__":
    main()
