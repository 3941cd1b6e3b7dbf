"""RMSNorm over each head, times the gate. T tokens, Hv value heads, Dv head size."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from engine.kernels.delta.plan import DeltaHeads
from engine.kernels.device import twin
from engine.kernels.norm import rms_norm


@twin("engine.kernels.delta.triton_gate")
def gated_norm(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, heads: DeltaHeads, *, has_silu: bool = True
) -> torch.Tensor:
    """Return rms_norm(out, weight) * silu(z), or sigmoid(z), [T, Hv Dv] for `out` [T, Hv, Dv] and z in the product x [T, N]."""
    gate = heads.view(x, heads.z, heads.ratio * heads.value_dim).unflatten(2, (-1, heads.value_dim)).flatten(1, 2)
    gate = silu(gate.float()) if has_silu else gate.float().sigmoid()
    return (rms_norm.reference(out, weight, eps) * gate).to(out.dtype).flatten(1)
