"""One worker of both roles under load.

python -m benchmarks.load --model                   the loads on a modelled worker, no GPU, beside vLLM's scheduling
python -m benchmarks.load --serve bf16 --cells chat-14,chat-20 --seconds 40 --out DIR     a server of its own on one GPU
python -m benchmarks.load --url http://127.0.0.1:8000 --cells chat-14       the same loads to a server, from outside
python -m benchmarks.load --model --step-target-ms 0 --cells long-cold --traces DIR
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from benchmarks.environment import card_of, describe
from benchmarks.load.cells import CELLS, TRACE, Cell, Device, chosen
from benchmarks.load.client import Served, send, served_at
from benchmarks.load.device import PAGES
from benchmarks.load.figures import HEAD, Row, keep
from benchmarks.load.model import serve
from benchmarks.load.policies import baton
from benchmarks.load.server import one_worker, warm
from benchmarks.load.vllm import vllm

FORMATS: tuple[Device, ...] = get_args(Device)


def main() -> int:
    """Return the exit code: 1 when a server refused a request, else 0."""
    options = _arguments()
    print(HEAD, flush=True)
    if options.model:
        return _model(options)
    if options.url:
        served = served_at(options.url, options.name, options.vocabulary)
        return _send(options, served, chosen(options.cells, options.device), where=options.where or options.url)
    return max([_serve(options, device) for device in FORMATS if device in options.serve.split(",")])


def _model(options: argparse.Namespace) -> int:
    policies = [*map(baton, options.step_target_ms or [None]), vllm()]
    for cell in chosen(options.cells, options.device):
        for policy in policies:
            seconds = options.seconds or cell.seconds
            outcome = serve(cell, policy, seconds=seconds, traces=options.traces)
            where = f"a worker modelled by {PAGES[cell.device]}"
            row = Row.of(cell, outcome, system=policy.name, source="modelled", where=where, seconds=seconds)
            print(row, flush=True)
            keep(row, options.out)
    return 0


def _serve(options: argparse.Namespace, device: Device) -> int:
    """Start a server with weights of that format, and send it the chosen loads of it."""
    if not (cells := chosen(options.cells, device)):
        return 0
    on = torch.device("cpu" if options.card == "cpu" else "cuda:0")
    facts = describe("benchmarks.load", sys.argv[1:], on, commit=options.commit)
    with one_worker(
        device, options.card, model=options.checkpoint, checkpoints=options.checkpoints, out=options.out, up=options.up
    ) as served:
        if options.warm_seconds:
            asyncio.run(warm(served, options.warm_seconds))
        return _send(options, served, cells, where=options.where or card_of(on).upper() or "CPU", facts=facts)


def _send(
    options: argparse.Namespace,
    served: Served,
    cells: Iterable[Cell],
    *,
    where: str,
    facts: dict[str, str] | None = None,
) -> int:
    """Send loads to a server, one after the other."""
    refused = 0
    for cell in cells:
        seconds = options.seconds or cell.seconds
        outcome = asyncio.run(send(cell, served, seconds=seconds, traces=options.traces))
        if not outcome.runs:
            print(f"{cell.name}: no request fits into {served.longest} tokens", file=sys.stderr, flush=True)
            continue
        row = Row.of(
            replace(cell, name=", ".join((cell.name, *options.arm))),
            outcome,
            system=options.system,
            source="measured",
            where=where,
            seconds=seconds,
            facts=facts,
        )
        print(row, flush=True)
        keep(row, options.out)
        if row.refused:
            refused += row.refused
            print(next(run.refusal for run in outcome.runs if run.refusal), file=sys.stderr, flush=True)
    return 1 if refused else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", action="store_true", help="a modelled worker in simulated time")
    where.add_argument("--url", default="", help="a server that runs: Baton, or another with /v1/completions")
    where.add_argument("--serve", default="", help="bf16, fp8 or both with a comma: a server of its own for each")
    parser.add_argument("--cells", default="", help=f"some loads alone, with commas: {', '.join(CELLS)}")
    parser.add_argument("--seconds", type=float, help="of arrivals; 40 without it")
    parser.add_argument("--out", type=Path, help="folder for load.json, and the logs of --serve")
    parser.add_argument("--traces", type=Path, help=f"folder with {TRACE}; without it long prompts are made up")
    parser.add_argument("--where", default="", help="what the figures call the machine; the card's name without it")
    parser.add_argument("--system", default="baton", help="what the figures call the server")
    parser.add_argument("--arm", action="append", default=[], help="added to the loads' names: what served them")
    sent = parser.add_argument_group("--model and --url")
    sent.add_argument("--device", choices=FORMATS, help="the loads of one format alone")
    sent.add_argument("--step-target-ms", type=float, action="append", help="of --model; may be repeated; 0 = no bound")
    sent.add_argument("--name", default="", help="of --url: the model's name; the server's first one without it")
    sent.add_argument("--vocabulary", type=int, default=100_000, help="of --url: prompts have token ids below it")
    own = parser.add_argument_group("--serve")
    own.add_argument("--card", default="cuda:0", help="as `baton up --device` takes it")
    own.add_argument("--checkpoint", type=Path, help="a model; without it random weights of Llama-3.1-8B's shape")
    own.add_argument("--checkpoints", type=Path, default=Path("/tmp/baton-checkpoints"), help="where those are written")
    own.add_argument("--warm-seconds", type=float, default=4.0, help="of arrivals of other requests before the loads")
    own.add_argument("--up", default="", help="further options of `baton up`, in one string")
    own.add_argument("--commit", default="", help="what the figures name when the repository has no history here")
    options = parser.parse_args()
    try:
        chosen(options.cells)
    except ValueError as error:
        parser.error(str(error))
    if options.serve and options.out is None:
        parser.error("--out is missing: the folder for the figures and the server's logs")
    if options.serve and not set(options.serve.split(",")) <= {*FORMATS}:
        parser.error(f"--serve {options.serve}: bf16, fp8 or both with a comma")
    return options


if __name__ == "__main__":
    sys.exit(main())
