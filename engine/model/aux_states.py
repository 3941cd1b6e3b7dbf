"""The model's hidden states that a draft head reads of a pass."""

from __future__ import annotations

import torch

from engine.spec.model import ModelSpec
from engine.weights.parameters import Weights


class AuxStates:
    """The residual stream as it enters some layers, side by side, or the normed output: [T, layers E]. A pass overwrites them.

    Captured passes write to the rows that were reserved before their capture, others to the same as far as these suffice.
    """

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self._size = spec.hidden_size
        draft = spec.draft
        self._width = 0 if draft is None else (len(draft.aux_layers) + draft.reads_output) * self._size
        self._weights = weights
        self._reserved = self._more = weights.empty((0, self._width))

    def reserve(self, rows: int) -> None:
        """Allocate rows that stay where they are."""
        self._reserved = self._weights.empty((rows, self._width))

    def keep(self, number: int, x: torch.Tensor) -> None:
        """Store the input x [T, E] of the layer with this number among those read."""
        self.of(len(x))[:, number * self._size : (number + 1) * self._size].copy_(x)

    def of(self, rows: int) -> torch.Tensor:
        """The states of a pass with so many rows."""
        if rows <= len(self._reserved):
            return self._reserved[:rows]
        if rows > len(self._more):
            self._more = self._weights.empty((rows, self._width))
        return self._more[:rows]
