"""LayerNorm of a sum, and of the sum of a token's rows. T tokens, E features, P partial sums, V rows of a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import layer_norm

from engine.kernels.device import twin

# A table [V, E], and the number of each token's row [T] int32.
Rows = tuple[torch.Tensor, torch.Tensor]
MOST_TABLES = 3


@twin("engine.kernels.texts.triton_layer_norm")
def norm_of_sum(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    keeps_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the LayerNorm of residual + x [T, E], and that sum if it is kept. The norm is of the sum in float32.

    `residual` [T, E]; `x` [T, E], partial sums [P, T, E], or None for 0. `weight` and `bias` [E].
    """
    total = residual.float()
    if x is not None:
        total = total + (x.float() if x.dim() == residual.dim() else x.sum(dim=0, dtype=torch.float32))
    kept = residual if x is None else total.to(residual.dtype)
    return _normed(total, weight, bias, eps).to(residual.dtype), kept if keeps_sum else None


@twin("engine.kernels.texts.triton_layer_norm")
def norm_of_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, eps: float, tables: Sequence[Rows], multiplier: float
) -> torch.Tensor:
    """Return the LayerNorm [T, E] of the sum of a row of each table, at most MOST_TABLES; the first one's times `multiplier`."""
    (first, rows), *others = tables
    total = first[rows].float() * multiplier
    for table, numbers in others:
        total = total + table[numbers].float()
    return _normed(total, weight, bias, eps).to(first.dtype)


def _normed(total: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return layer_norm(total, weight.shape, weight.float(), None if bias is None else bias.float(), eps)
