"""The model's hidden states that a draft head reads of a pass."""

from __future__ import annotations

import torch

from engine.spec.model import ModelSpec
from engine.weights.parameters import Weights


class AuxStates:
    """The residual stream as it enters some layers, side by side, or the normed output: [T, layers E]. A pass overwrites them.

    Captured passes write to the rows that were reserved before their capture, others to the same as far as these suffice.

    A stage keeps those of its own layers. Behind its rows it gets those of the stages before, without the first one, and hands
    both on: so the first one gets all others' from the last, and `give`s them to its drafter.
    """

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        draft, first = spec.draft, spec.stage.ranges[0] if spec.stage is not None else spec.own_layers
        layers = draft.aux_layers if draft is not None else ()
        reads_output = draft is not None and draft.reads_output
        here = sum(layer in spec.own_layers for layer in layers) + (reads_output and spec.has_head)
        self._size = spec.hidden_size
        self._before = [layer for layer in layers if layer < spec.own_layers.start]
        whole, passed = len(layers) + reads_output, sum(layer not in first for layer in self._before)
        self.arriving = (whole - here if spec.has_embedding else passed) * self._size  # features
        self._kept = _Rows(weights, here * self._size)
        self._given = self._kept if spec.stage is None else _Rows(weights, whole * self._size * spec.has_embedding)

    def reserve(self, rows: int) -> None:
        """Allocate rows that stay where they are."""
        self._kept.reserve(rows)
        self._given.reserve(rows)

    def keep(self, number: int, x: torch.Tensor) -> None:
        """Store the input x [T, E] of the layer with this number among those read."""
        number -= len(self._before)
        self.kept(len(x))[:, number * self._size : (number + 1) * self._size].copy_(x)

    def kept(self, rows: int) -> torch.Tensor:
        """The states of a pass with so many rows that this process has computed."""
        return self._kept.of(rows)

    def give(self, kept: torch.Tensor, arrived: torch.Tensor) -> None:
        """Let the drafter read a pass's states [T, ..]: those that this stage had `kept`, and those of the others."""
        torch.cat((kept, arrived), -1, out=self.of(len(kept)))

    def of(self, rows: int) -> torch.Tensor:
        """The states of a pass with so many rows, for the drafter."""
        return self._given.of(rows)


class _Rows:
    """Memory for the rows of a pass."""

    def __init__(self, weights: Weights, width: int) -> None:
        self._weights, self._width = weights, width
        self._reserved = self._more = weights.empty((0, width))

    def reserve(self, rows: int) -> None:
        self._reserved = self._weights.empty((rows, self._width))

    def of(self, rows: int) -> torch.Tensor:
        if rows <= len(self._reserved):
            return self._reserved[:rows]
        if rows > len(self._more):
            self._more = self._weights.empty((rows, self._width))
        return self._more[:rows]
