"""Matrix products in the formats of checkpoints. T tokens, K inputs, N outputs, P partial sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from engine.kernels.linear import gated_linear, linear, linear_onto, linear_parts, packed
from engine.model.parameters import Parameter, Part, Shard, Weights, stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """A product [T, K] -> [T, N] with the stacked matrices of several of the checkpoint's modules."""

    inputs: int
    outputs: Mapping[str, int]  # by module
    bias: bool
    shard: Shard
    unit: int = 1  # outputs or inputs that no rank cuts apart
    fused: str = ""  # one module with the rows of all `outputs`
    twice: Mapping[str, str] = field(default_factory=dict)  # module -> the one whose rows are its own, too


class Linear(Protocol):
    """A product with a weight, whatever its format."""

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product [T, N], in `out` if it is given."""
        ...

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, or partial sums [P, T, N] for a kernel that adds up as it reads."""
        ...

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Add the product to `residual` [T, N] in place and return None, or leave it and return `parts`."""
        ...

    def gated(self, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """Return act(first half) * second half of the product, [T, N / 2]; "silu" or "gelu_tanh"."""
        ...


@dataclass(slots=True)
class Dense:
    """A weight in a dtype that the model computes in."""

    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None = None  # [N]

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, self.weight, self.bias, out=out)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return linear_parts(x, self.weight, self.bias)

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        return linear_onto(residual, x, self.weight, self.bias)

    def gated(self, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        return gated_linear(x, self.weight, self.bias, activation)

    def pack(self) -> None:
        """Order the loaded weight as products read it fastest."""
        self.weight = packed(self.weight)


def declare_dense(spec: LinearSpec, weights: Weights, *, under: str) -> Linear:
    """Declare `weight` and `bias` of each module below the name `under`."""
    size = sum(spec.outputs.values())
    weight = Parameter(
        shape=(size, spec.inputs),
        parts=_parts(spec, "weight"),
        shard=spec.shard,
        unit=spec.unit,
    )
    bias = None
    if spec.bias:
        # Ranks that share the inputs add the bias once, so each has all of it.
        shard = Shard.NONE if spec.shard is Shard.INPUTS else spec.shard
        parameter = Parameter(shape=(size,), parts=_parts(spec, "bias"), shard=shard, unit=spec.unit)
        bias = weights.new(parameter, under=under)
    dense = Dense(weights.new(weight, under=under), bias)
    weights.when_loaded.append(dense.pack)
    return dense


def _parts(spec: LinearSpec, kind: str) -> tuple[Part, ...]:
    """The rows of each module in the stack."""
    parts = stacked(spec.outputs)
    if spec.fused:
        return tuple(
            replace(part, name=f"{spec.fused}.{kind}", stored=part.rows, of=sum(spec.outputs.values()))
            for part in parts
        )
    return tuple(replace(part, name=f"{spec.twice.get(part.name, part.name)}.{kind}") for part in parts)


class Format(Protocol):
    """How a checkpoint stores its matrices: declares the parameters of one product and returns it."""

    def __call__(self, spec: LinearSpec, weights: Weights, *, under: str) -> Linear: ...


FORMATS: dict[str | None, Format] = {None: declare_dense}  # by quantization_config.quant_method
