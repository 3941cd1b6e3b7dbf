"""Adapters of a model of its own (Jina v3), of which one adds to each product and to each token's rows.

A adapters, R their rank, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.pooling.spec import AdaptersSpec
from engine.weights.parameters import Weights, whole


class Adapters:
    """The adapter of the pass that runs. One thread at a time."""

    def __init__(self, spec: AdaptersSpec, weights: Weights) -> None:
        self._spec, self._weights = spec, weights
        self.chosen: int | None = None

    def beside(
        self, product: Callable[[torch.Tensor], torch.Tensor], name: str, inputs: int, outputs: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product of the matrix `name`, and what the chosen adapter adds to it."""
        down, up = self._pair(name, (self._spec.rank, inputs), (outputs, self._spec.rank))

        def both(x: torch.Tensor) -> torch.Tensor:
            found = product(x)
            if self.chosen is not None:
                found += (x @ down[self.chosen].T @ up[self.chosen].T) * self._spec.scale
            return found

        return both

    def rows(self, name: str, count: int, size: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """The chosen adapter's part of rows of the table `name` [count, size], by their numbers [T]."""
        left, right = self._pair(name, (count, self._spec.rank), (self._spec.rank, size))

        def added(numbers: torch.Tensor) -> torch.Tensor | None:
            if self.chosen is None:
                return None
            return (left[self.chosen][numbers] @ right[self.chosen]) * self._spec.scale

        return added

    def _pair(self, name: str, first: tuple[int, int], second: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        new, count = self._weights.new, self._spec.count
        return new(whole(f"{name}.lora_A", count, *first)), new(whole(f"{name}.lora_B", count, *second))
