"""Texts to vectors: on a CPU beside sentence-transformers and ONNX Runtime, on a GPU beside the rate of its products.

    python -m benchmarks.pooling --out benchmarks/results --peers VENV/bin/python
    python -m benchmarks.pooling --device cuda --out benchmarks/results       within two minutes

On a CPU all-MiniLM-L6-v2 (`python -m tests.real.packages` fetches it) makes vectors of one text and of 32, tokenising included,
in float32. Each engine is a process that waits while others compute, and they take turns. `--peers` is a Python that has
sentence-transformers, onnxruntime and onnx; an engine that is not there is skipped. On a GPU weights are random, in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.environment import card_of, describe, device_of
from benchmarks.pooling import beside, card
from benchmarks.results_format import ResultsPage, notes_of


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the page")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", type=Path, default=Path(sys.executable), help="a Python with the other engines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round; with --shapes tiny ones")
    parser.add_argument("--shapes", action="store_true", help="what a GPU computes, on the CPU")
    options = parser.parse_args(arguments)
    device = device_of("benchmarks.pooling", options.device)
    facts = describe("benchmarks.pooling", arguments, device)
    is_card = device.type == "cuda" or options.shapes
    stem, title = "pooling", "all-MiniLM-L6-v2 on a CPU, beside other engines"
    if is_card:
        stem, title = f"pooling-{card_of(device) or 'shapes'}", "Models that pool, on one device"
    else:
        facts |= {"processor": beside.processor(), "threads": str(options.threads), "flags": beside.flags()}
    page = None
    if options.out is not None:
        page = ResultsPage(options.out, stem, title=title, facts=facts, notes=notes_of(stem, options.out))
    for name, fact in facts.items():
        print(f"{name}: {fact}", flush=True)

    def state(name: str, fact: str) -> None:
        print(f"{name}: {fact}", flush=True)
        if page is not None:
            page.state(name, fact)

    rounds = 1 if options.quick else options.rounds
    found = (
        card.figures(device, quick=options.quick)
        if is_card
        else beside.figures(options.peers, threads=options.threads, rounds=rounds, state=state)
    )
    for result in found:
        print(f"{result.name:56} {result.value:12.3f} {result.unit}", flush=True)
        if page is not None:
            page.add(result)
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    raise SystemExit(main(sys.argv[1:]))
