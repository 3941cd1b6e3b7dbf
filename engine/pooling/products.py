"""Products with what follows them, in one call where the device has it. T tokens, K inputs, N outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import relu

from engine.formats.dense import Dense
from engine.formats.forms import Added
from engine.formats.product import Linear
from engine.kernels.activation import ACTIVATIONS, erf_gelu_and_mul
from engine.kernels.device import use_triton
from engine.kernels.linear import activated_linear
from engine.kernels.native import floats
from engine.weights.parameters import Weights

ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {**ACTIVATIONS, "relu": relu, "tanh": torch.tanh}
FUSED_GATES = ("silu", "gelu_tanh")  # `Linear.gated` computes them


class Product:
    """act(x W + b), or gated act(x G) * (x U): a declared product of the engine, packed once it is loaded."""

    def __init__(
        self,
        linear: Linear,
        weights: Weights,
        *,
        activation: str = "",
        is_gated: bool = False,
        is_up_first: bool = False,
    ) -> None:
        """`is_up_first`: the rows of up precede those of the gate."""
        self._linear, self._activation = linear, activation
        self._is_gated, self._is_up_first = is_gated, is_up_first
        self._panels: floats.Panels | None = None
        weights.when_loaded.append(self._pack)

    def _pack(self) -> None:
        linear = self._linear
        if (
            not isinstance(linear, Dense)
            or not floats.takes(linear.weight)
            or self._activation not in floats.ACTIVATIONS
        ):
            return
        weight, bias = linear.weight, linear.bias
        if self._is_up_first:
            weight = torch.cat(weight.chunk(2)[::-1])
            bias = None if bias is None else torch.cat(bias.chunk(2)[::-1])
        self._panels = floats.packed(weight, bias, self._activation, is_gated=self._is_gated)
        linear.weight = weight.new_empty(0)  # a second copy of a model would be too much

    def __call__(self, x: torch.Tensor, room: floats.Room | None = None) -> torch.Tensor:
        """Return [T, N] for x [T, K]; gated half as many. `room`: where it may lie."""
        if self._panels is not None:
            return floats.product(x, self._panels, room=room)
        if self._is_gated and self._activation in FUSED_GATES and not self._is_up_first:
            return self._linear.gated(x, self._activation)
        if isinstance(self._linear, Dense) and self._activation in ACTIVATIONS and not self._is_gated:
            return activated_linear(x, self._linear.weight, self._linear.bias, self._activation)
        return activated(self._linear(x), self._activation, is_gated=self._is_gated, is_up_first=self._is_up_first)

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        """Add the product to `residual` [T, N] in place and return None, or leave it and return what is to be added."""
        if self._panels is not None:
            floats.product(x, self._panels, onto=residual)
            return None
        return self._linear.onto(residual, x)


class Adapted:
    """A product and what an adapter adds to it, before the activation; see `Product`."""

    def __init__(
        self, both: Callable[[torch.Tensor], torch.Tensor], activation: str, *, is_gated: bool, is_up_first: bool
    ) -> None:
        self._both, self._activation = both, activation
        self._is_gated, self._is_up_first = is_gated, is_up_first

    def __call__(self, x: torch.Tensor, room: floats.Room | None = None) -> torch.Tensor:
        return activated(self._both(x), self._activation, is_gated=self._is_gated, is_up_first=self._is_up_first)

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        return self._both(x)


def activated(found: torch.Tensor, activation: str, *, is_gated: bool, is_up_first: bool) -> torch.Tensor:
    """Return act(found), or gated act(one half) * the other."""
    if not is_gated:
        return ACTS[activation](found) if activation else found
    if activation == "gelu" and use_triton(found):
        return erf_gelu_and_mul(found, is_up_first=is_up_first)
    gate, up = found.chunk(2, dim=-1)
    if is_up_first:
        gate, up = up, gate
    return ACTS[activation](gate) * up
