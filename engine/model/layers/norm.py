"""A layer's norm: its kind, weights and epsilon."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm

from engine.formats.forms import PLAIN, Added, InputForm, Rows, summed
from engine.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight)."""

    weight: torch.Tensor  # [E]
    eps: float
    plus_one: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, plus_one=self.plus_one)

    def of_sum(self, x: Added, residual: torch.Tensor, form: InputForm = PLAIN) -> tuple[Rows, torch.Tensor]:
        """Return the norm of x + residual in a product's form, and the sum, in one kernel; see `add_rms_norm`."""
        return form.of_norm(x, residual, self.weight, self.eps, plus_one=self.plus_one)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias."""

    weight: torch.Tensor  # [E]
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def of_sum(self, x: Added, residual: torch.Tensor, form: InputForm = PLAIN) -> tuple[Rows, torch.Tensor]:
        """Return the norm of x + residual in a product's form, and the sum."""
        total = summed(x, residual)
        return form.of(self(total)), total


Norm = RmsNorm | LayerNorm
