"""RMSNorm, alone and fused with the residual sum. T tokens (any leading shape), E features, P partial sums."""

from __future__ import annotations

import torch

from engine.kernels.backend import use_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight for `x` [..., E]; the mean square is taken in float32, the product in x's dtype."""
    if use_triton(x):
        from engine.kernels.triton_norm import rms_norm as kernel

        return kernel(x, weight, eps)
    return reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual), both [..., E] in residual's dtype.

    `x` may have one dimension more than `residual`, [P, ..., E]: partial sums, added up in float32 first (`linear_parts`). None:
    `residual` is the sum already (`linear_onto`).
    """
    if x is None:
        return rms_norm(residual, weight, eps), residual
    if use_triton(x):
        from engine.kernels.triton_norm import add_rms_norm as kernel

        return kernel(x, residual, weight, eps)
    return add_reference(x, residual, weight, eps)


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The twin of `rms_norm`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `add_rms_norm`."""
    if x.dim() > residual.dim():
        x = x.sum(dim=0).to(residual.dtype)
    total = x + residual
    return reference(total, weight, eps), total
