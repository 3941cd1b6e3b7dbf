"""RMSNorm, alone and fused with the residual sum. T tokens (any leading shape), E features, P partial sums."""

from __future__ import annotations

from struct import Struct

import torch

from engine.kernels import native
from engine.kernels.device import twin
from engine.kernels.once import constant

_IN_C = Struct("3P4qd")  # `Norm` of `rows.c`


@twin("engine.kernels.triton_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, plus_one: bool = False) -> torch.Tensor:
    """Return x / rms(x) * weight for `x` [..., E]. The mean square is taken in float32, the product in x's dtype.

    None for `weight`: 1. `plus_one`: 1 + weight, and the product is in float32, too.
    """
    wide = x.float()
    wide = wide * inverse_rms(wide, eps)
    if weight is None:
        return wide.to(x.dtype)
    return (wide * (1.0 + weight.float())).to(x.dtype) if plus_one else weight * wide.to(x.dtype)


def inverse_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / rms(x) [..., 1] for `wide` [..., E] float32.

    By operations whose code others have brought into a CPU's cache: products with weights drive it out again and again.
    """
    squares = torch.linalg.vector_norm(wide, 2, -1, True)
    squares.mul_(squares).mul_(constant(1 / wide.shape[-1], wide.device)).add_(constant(eps, wide.device))
    return squares.rsqrt_()


def suits_c(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if `rms_norm_in_c` computes it, where C's kernels are."""
    return x.dtype == weight.dtype == torch.float32 and x.shape[-1] % 8 == 0 and x.is_contiguous()


def rms_norm_in_c(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool) -> torch.Tensor:
    """Return `rms_norm` of rows [T, E] in float32. `weight` [E] float32. A row's bits don't depend on the others."""
    library, out = native.library(), torch.empty_like(x)
    assert library is not None
    library.baton_rows_norm(
        _IN_C.pack(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, plus_one, torch.get_num_threads(), eps
        )
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual), both [..., E] in residual's dtype.

    `x` may be partial sums [P, ..., E], added up in float32 first (`linear_parts`). With None for `x`, `residual` is the sum
    already (`linear_onto`).
    """
    if x is None:
        return rms_norm(residual, weight, eps, plus_one=plus_one), residual
    return add_and_norm(x, residual, weight, eps, plus_one=plus_one)


@twin("engine.kernels.triton_norm")
def add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() > residual.dim():
        x = x.sum(dim=0, dtype=torch.float32).to(residual.dtype)
    total = x + residual
    return rms_norm.reference(total, weight, eps, plus_one=plus_one), total
