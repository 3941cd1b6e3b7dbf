"""Times of kinds of a product on a CPU, in turn, over copies of a matrix that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


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
