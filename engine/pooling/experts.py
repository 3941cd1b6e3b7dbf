"""Experts in place of an MLP. T tokens, E hidden size, I an expert's intermediate size, N experts."""

from __future__ import annotations

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
        self._panels: list[tuple[floats.Panels, floats.Panels]] = []
        weights.when_loaded.append(self._pack)

    def _pack(self) -> None:
        if not floats.takes(self._up):
            return
        self._panels = [
            (floats.packed(up, None, self._spec.activation), floats.packed(down.T, None))
            for up, down in self._matrices()
        ]
        self._up = self._down = self._up.new_empty(0)  # a second copy of a model would be too much

    def _matrices(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each expert's two [I, E]."""
        both = (each.chunk(self._spec.count) for each in (self._up, self._down))
        return list(zip(*both, strict=True))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, E]. On a GPU the host waits for the number of each expert's tokens."""
        shares, chosen = self._router(x).softmax(dim=-1, dtype=torch.float32).topk(self._spec.chosen, dim=-1)
        found = self._bias.expand(x.shape).clone()
        for expert in range(self._spec.count):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            if len(rows):
                its = self._computed(expert, x[rows]) * shares[rows, places, None].to(x.dtype)
                found.index_add_(0, rows, its)  # no token is there twice
        return found

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Product.onto`: what is to be added."""
        return self(x)

    def _computed(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        if self._panels:
            up, down = self._panels[expert]
            return floats.product(floats.product(x, up), down)
        own_up, own_down = self._matrices()[expert]
        return ACTS[self._spec.activation](linear(x, own_up)) @ own_down
