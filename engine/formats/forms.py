"""Input forms: the formats of a product's input rows, written by whoever computes them last. T tokens, K inputs.

A product says by `Linear.wants` which form it reads; the residual stream's norm, or the gated product before it, writes that
form in one kernel. A product that wraps another one, an adapter for instance, may want `PLAIN` for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.kernels.norm import add_rms_norm
from engine.kernels.quantised import fp8, int8

Rows = Any  # rows in an input form: a tensor [T, K], `Fp8Rows`, `Int8Rows`


class InputForm(Protocol):
    """The format of rows [T, K] for a product."""

    def of(self, x: torch.Tensor) -> Rows:
        """Return plain rows in this form."""
        ...

    def of_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
    ) -> tuple[Rows, torch.Tensor]:
        """Return rms_norm(x + residual) in this form, and x + residual; `x` as for `add_rms_norm`."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Unquantised rows."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def of_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps, plus_one=plus_one)


PLAIN = Plain()


@dataclass(frozen=True, slots=True)
class InFp8:
    """Rows in 8-bit floats with scales."""

    rounding: fp8.Rounding

    def of(self, x: torch.Tensor) -> fp8.Fp8Rows:
        return fp8.quantise_rows(x, self.rounding)

    def of_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
    ) -> tuple[fp8.Fp8Rows, torch.Tensor]:
        return fp8.normed_rows(residual, x, weight, eps, self.rounding, plus_one=plus_one)


@dataclass(frozen=True, slots=True)
class InInt8:
    """Rows in int8: two 8-bit codes an element."""

    columns: torch.Tensor  # [K] float32: factors of the inputs before rounding

    def of(self, x: torch.Tensor) -> int8.Int8Rows:
        return int8.quantised(x.float() * self.columns, x.dtype)

    def of_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
    ) -> tuple[int8.Int8Rows, torch.Tensor]:
        total = summed(x, residual)
        return int8.normed_rows(total, weight, eps, self.columns, plus_one=plus_one), total


def summed(x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """Return residual + x [T, E] in residual's dtype; `x` may be partial sums [P, T, E], or None for nothing."""
    if x is None:
        return residual
    return residual + (x.sum(dim=0) if x.dim() > residual.dim() else x).to(residual.dtype)
