"""Input forms: the formats of a product's input rows, written by whoever computes them last. T tokens, K inputs.

A product says by `Linear.wants` which form it reads; the residual stream's norm, or the gated product before it, writes that
form in one kernel. A product that wraps another one, an adapter for instance, may want `PLAIN` for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.kernels.collectives import Peers
from engine.kernels.norm import add_rms_norm, rms_norm, rms_norm_in_c, suits_c
from engine.kernels.quantised import fp8, int8
from engine.parallel.group import Group

Rows = Any  # rows in an input form: a tensor [T, K], `Fp8Rows`, `Int8Rows`


@dataclass(frozen=True, slots=True)
class RankSum:
    """A sum over ranks that is still to be computed: this rank's term [T, E], or parts of it [P, T, E]."""

    own: torch.Tensor
    group: Group

    def index_select(self, dim: int, rows: torch.Tensor) -> RankSum:
        """Return the sum of some rows."""
        return RankSum(self.own.index_select(dim, rows), self.group)

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        """Compute it, [T, E]."""
        if isinstance(self.group, Peers):
            return self.group.all_reduce_parts(self.own, dtype)
        return self.group.all_reduce(total_of(self.own, dtype))


# Terms of the residual stream: a tensor [T, E], partial sums [P, T, E], a sum over ranks, or nothing.
Added = torch.Tensor | RankSum | None


class InputForm(Protocol):
    """The format of rows [T, K] for a product."""

    def of(self, x: torch.Tensor) -> Rows:
        """Return plain rows in this form."""
        ...

    def of_norm(
        self, x: Added, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
    ) -> tuple[Rows, torch.Tensor]:
        """Return rms_norm(x + residual) in this form, and x + residual; `x` as for `add_rms_norm`."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Unquantised rows."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def of_norm(
        self, x: Added, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(x, RankSum) and isinstance(x.group, Peers):
            return x.group.all_reduce_norm(x.own, residual, weight, eps, plus_one=plus_one)
        return add_rms_norm(over_ranks(x, residual.dtype), residual, weight, eps, plus_one=plus_one)


PLAIN = Plain()


@dataclass(frozen=True, slots=True)
class InFloats:
    """Unquantised rows for products in C, as those with tiles, which quantise them; so is their norm."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def of_norm(
        self, x: Added, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = summed(x, residual)
        if suits_c(total, weight):
            return rms_norm_in_c(total, weight, eps, plus_one=plus_one), total
        return rms_norm(total, weight, eps, plus_one=plus_one), total


IN_FLOATS = InFloats()


@dataclass(frozen=True, slots=True)
class InFp8:
    """Rows in 8-bit floats with scales."""

    rounding: fp8.Rounding

    def of(self, x: torch.Tensor) -> fp8.Fp8Rows:
        return fp8.quantise_rows(x, self.rounding)

    def of_norm(
        self, x: Added, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
    ) -> tuple[fp8.Fp8Rows, torch.Tensor]:
        x = over_ranks(x, residual.dtype)
        return fp8.normed_rows(residual, x, weight, eps, self.rounding, plus_one=plus_one)


@dataclass(frozen=True, slots=True)
class InInt8:
    """Rows in int8: two 8-bit codes an element."""

    columns: torch.Tensor  # [K] float32: factors of the inputs before rounding

    def of(self, x: torch.Tensor) -> int8.Int8Rows:
        return int8.quantised(x.float() * self.columns, x.dtype)

    def of_norm(
        self, x: Added, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
    ) -> tuple[int8.Int8Rows, torch.Tensor]:
        total = summed(x, residual)
        return int8.normed_rows(total, weight, eps, self.columns, plus_one=plus_one), total


def total_of(x: torch.Tensor | RankSum, dtype: torch.dtype) -> torch.Tensor:
    """Return a term of the stream [T, E] in `dtype`: its parts [P, T, E] and ranks added."""
    if isinstance(x, RankSum):
        return x.total(dtype)
    return (x.sum(dim=0) if x.dim() > 2 else x).to(dtype)


def over_ranks(x: Added, dtype: torch.dtype) -> torch.Tensor | None:
    """Return `x` with its sum over ranks, if it is one."""
    return x.total(dtype) if isinstance(x, RankSum) else x


def summed(x: Added, residual: torch.Tensor) -> torch.Tensor:
    """Return residual + x [T, E] in residual's dtype."""
    return residual if x is None else residual + total_of(x, residual.dtype)
