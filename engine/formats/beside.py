"""A stack of modules whose formats differ: a product each, side by side. T tokens, N outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch

from engine.formats.forms import PLAIN, InputForm, Rows
from engine.formats.product import Format, Linear, LinearSpec
from engine.kernels.activation import act_and_mul
from engine.weights.parameters import Weights


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Products of the same inputs."""

    linears: tuple[Linear, ...]

    def wants(self, num_rows: int, dtype: torch.dtype) -> InputForm:
        return PLAIN

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1, out=out)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        return self(x)

    def gated(self, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        return act_and_mul(self(x), activation)

    def gated_as(self, form: InputForm, x: torch.Tensor, activation: str = "silu") -> Rows:
        return form.of(self.gated(x, activation))


def declare(spec: LinearSpec, format_of: Callable[[str], Format], weights: Weights, *, under: str) -> Linear:
    """Declare a product: one of all outputs, or one for each run of outputs whose modules have the same format."""
    groups = [
        (format, list(outputs))
        for format, outputs in groupby(spec.outputs, key=lambda output: format_of(under + spec.module(output)))
    ]
    if len(groups) == 1:
        return groups[0][0].linear(spec, weights, under=under)
    return SideBySide(tuple(format.linear(spec.only(some), weights, under=under) for format, some in groups))
