"""MLPs with an up and a down projection: gated, down(act(gate(x)) * up(x)), with gate and up as one GEMM, or plain."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import torch
from torch.nn.functional import softplus

from engine.formats.product import LinearSpec
from engine.kernels.activation import ACTIVATIONS, act_and_mul, sparse_act_and_mul
from engine.model.layers.building import Surroundings
from engine.model.stream import Stream
from engine.spec.model import GatedMlpSpec, PlainMlpSpec
from engine.weights.parameters import Shard


class GatedMlp:
    def __init__(self, spec: GatedMlpSpec, around: Surroundings) -> None:
        hidden = around.model.hidden_size
        gate_up = {f"{spec.under}.{name}": spec.size for name in (spec.gate, spec.up)}
        down = {spec.down: hidden}
        self._branch = around.branch
        self._gate_up = around.linear(
            LinearSpec(inputs=hidden, outputs=gate_up, bias=spec.bias, shard=Shard.OUTPUTS, fused=spec.fused)
        )
        self._down = around.linear(LinearSpec(inputs=spec.size, outputs=down, bias=spec.bias, shard=Shard.INPUTS))
        self._activation = spec.activation
        self._between = _between(around.own(spec))

    def __call__(self, stream: Stream) -> None:
        if self._between is None:
            self._branch.add_gated(stream, self._gate_up, self._down, self._activation)
        else:
            self._branch.add(stream, self._down, self._between(self._branch.product(stream, self._gate_up)))

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of x [T, E]."""
        if self._between is None:
            return self._down(self._gate_up.gated(x, self._activation))
        return self._down(self._between(self._gate_up(x)))


def _between(spec: GatedMlpSpec) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the activation between the GEMMs, [T, 2 I] -> [T, I], if they don't fuse it."""
    if spec.sparsity:
        # Deviations from a gate's mean: the quantile of a normal distribution for the sparsity.
        cutoff = NormalDist().inv_cdf(spec.sparsity)
        return lambda gate_up: sparse_act_and_mul(gate_up, cutoff, spec.activation)
    if spec.gate_multiplier != 1.0:
        return lambda gate_up: _multiplied(gate_up, spec)
    return None


def _multiplied(gate_up: torch.Tensor, spec: GatedMlpSpec) -> torch.Tensor:
    gate_up[:, : spec.size] *= spec.gate_multiplier
    return act_and_mul(gate_up, spec.activation)


class PlainMlp:
    def __init__(self, spec: PlainMlpSpec, around: Surroundings) -> None:
        hidden = around.model.hidden_size
        self._branch = around.branch
        self._up = around.linear(
            LinearSpec(inputs=hidden, outputs={spec.up: spec.size}, bias=spec.bias, shard=Shard.OUTPUTS)
        )
        self._down = around.linear(
            LinearSpec(inputs=spec.size, outputs={spec.down: hidden}, bias=spec.bias, shard=Shard.INPUTS)
        )
        self._activate = Xielu(spec.learned, around) if spec.activation == "xielu" else ACTIVATIONS[spec.activation]

    def __call__(self, stream: Stream) -> None:
        self._branch.add(stream, self._down, self._activate(self._up(self._branch.read(stream))))


class Xielu:
    """xIELU: a square above 0, an exponential below, with learned slopes (Huang and Schlag, 2024)."""

    def __init__(self, module: str, around: Surroundings) -> None:
        self._square, self._below, self._slope, self._near_zero = (
            around.in_float32(f"{module}.{name}", 1) for name in ("alpha_p", "alpha_n", "beta", "eps")
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide, square, below = x.float(), softplus(self._square), self._slope + softplus(self._below)
        under = (torch.expm1(torch.minimum(wide, self._near_zero)) - wide) * below
        return (torch.where(wide > 0, square * wide * wide, under) + self._slope * wide).to(x.dtype)
