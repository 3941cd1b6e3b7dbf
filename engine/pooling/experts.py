"""Experts in place of an MLP. T tokens, E hidden size, I an expert's intermediate size, N experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import linear

from engine.kernels.native import floats
from engine.pooling.products import ACTS, Product
from engine.pooling.spec import ExpertsSpec
from engine.weights.parameters import Weights, whole


class Experts:
    """Each token by those experts that a router chooses for it: an expert's tokens are products of two of its matrices."""

    def __init__(self, spec: ExpertsSpec, under: str, hidden: int, router: Product, weights: Weights) -> None:
        """`router` has a score [T, N] for each expert."""
        self._spec, self._router = spec, router
        shape = spec.count * spec.intermediate_size, hidden
        self._up, self._down = (weights.new(whole(under + name, *shape)) for name in (spec.up, spec.down))
        self._bias = weights.new(whole(under + spec.bias, hidden))
        self._each: list[Callable[[torch.Tensor], torch.Tensor]] = []
        weights.when_loaded.append(self._pack)

    def _pack(self) -> None:
        activation, both = self._spec.activation, (each.chunk(self._spec.count) for each in (self._up, self._down))
        matrices = list(zip(*both, strict=True))  # each expert's two [I, E]
        if not floats.takes(self._up):
            self._each = [partial(_computed, up, down, activation) for up, down in matrices]
            return
        packed = [(floats.packed(up, None, activation), floats.packed(down.T, None)) for up, down in matrices]
        self._each = [partial(_computed_in_c, up, down) for up, down in packed]
        self._up = self._down = self._up.new_empty(0)  # a second copy of a model would be too much

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, E]. On a GPU the host waits for the number of each expert's tokens."""
        shares, chosen = self._router(x).softmax(dim=-1, dtype=torch.float32).topk(self._spec.chosen, dim=-1)
        found = self._bias.expand(x.shape).clone()
        for expert, compute in enumerate(self._each):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            if len(rows):
                its = compute(x[rows]) * shares[rows, places, None].to(x.dtype)
                found.index_add_(0, rows, its)  # no token is there twice
        return found

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Product.onto`: what is to be added."""
        return self(x)


def _computed(up: torch.Tensor, down: torch.Tensor, activation: str, x: torch.Tensor) -> torch.Tensor:
    return ACTS[activation](linear(x, up)) @ down


def _computed_in_c(up: floats.Panels, down: floats.Panels, x: torch.Tensor) -> torch.Tensor:
    return floats.product(floats.product(x, up), down)
