"""Times of kinds of a product on a CPU, in turn, over copies of a matrix that no cache holds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.tables import table

Product = Callable[[torch.Tensor], torch.Tensor]


def options_of(arguments: Sequence[str], said: str | None, page: str, rows: Sequence[int]) -> argparse.Namespace:
    """The options of a benchmark of products, `--out` and `--rows`. One thread computes from then on."""
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"folder for {page}.md")
    parser.add_argument("--rows", type=int, nargs="+", default=list(rows))
    torch.set_num_threads(1)
    return parser.parse_args(arguments)


def milliseconds(ways: Sequence[Mapping[str, Product]], x: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """CPU time of one product by kind, round by round: in each a kind goes through all copies of the matrix."""
    found: dict[str, list[float]] = {name: [] for name in ways[0]}
    for _ in range(rounds):
        for name, times in found.items():
            began = time.process_time()
            for copy in ways:
                copy[name](x)
            times.append(1000 * (time.process_time() - began) / len(ways))
    return found


def by_rows(
    shape: tuple[int, int],
    ways: Sequence[Mapping[str, Product]],
    rows: Sequence[int],
    rounds: int,
    generator: torch.Generator | None = None,
) -> str:
    """A table of the best times for so many `rows` each, of a matrix [N, K]: `ways` are its kinds, once for each copy."""
    cells = {}
    for count in rows:
        x = torch.randn((count, shape[1]), generator=generator)
        times = milliseconds(ways if count <= 8 else ways[:1], x, rounds)  # more rows are bound by arithmetic
        own = {name: min(each) for name, each in times.items()}
        print(shape, count, own, file=sys.stderr, flush=True)
        cells[f"{count} rows"] = [f"{each:.3g}" for each in own.values()]
    return "\n".join(table(f"{shape[0]} x {shape[1]}", ways[0], cells))
