"""The gate and the norm after the scan. T tokens, D features of all heads."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from engine.kernels.device import twin
from engine.kernels.mamba.heads import MambaHeads


@twin("engine.kernels.mamba.triton_gate")
def gate(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, heads: MambaHeads
) -> torch.Tensor:
    """Return `out` [T, D] times silu(z), with RMSNorm over each group of D / `heads.norm_groups` before or after, or without.

    z are the first columns of the product `x` [T, N]; `weight` [D] is the norm's. All of it is in float32.
    """
    gates, wide = silu(x[:, : heads.size].float()), out.float()
    if weight is None:
        return (wide * gates).to(out.dtype)
    if heads.norm == "after":
        wide = wide * gates
    grouped = wide.unflatten(1, (heads.norm_groups, -1))
    wide = (grouped * (grouped.square().mean(dim=-1, keepdim=True) + eps).rsqrt()).flatten(1) * weight.float()
    return (wide * gates if heads.norm == "before" else wide).to(out.dtype)
