"""A norm as a layer has it: its kind, weights and epsilon."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm

from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.quantised.fp8 import Fp8Rows, Rounding, normed_rows


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight)."""

    weight: torch.Tensor  # [E]
    eps: float
    plus_one: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, plus_one=self.plus_one)

    def of_sum(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of the sum, and the sum; see `add_rms_norm`."""
        return add_rms_norm(x, residual, self.weight, self.eps, plus_one=self.plus_one)

    def rows_of_sum(
        self, x: torch.Tensor | None, residual: torch.Tensor, rounding: Rounding
    ) -> tuple[Fp8Rows, torch.Tensor]:
        """The same with the norm in 8-bit floats."""
        return normed_rows(residual, x, self.weight, self.eps, rounding, plus_one=self.plus_one)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    weight: torch.Tensor  # [E]
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def of_sum(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x is not None:
            residual = residual + (x.sum(dim=0) if x.dim() > residual.dim() else x).to(residual.dtype)
        return self(residual), residual


Norm = RmsNorm | LayerNorm
