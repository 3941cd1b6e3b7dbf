"""Triton version of `gate`: some heads of a token in a program. T tokens, Hv value heads, Dv head size."""

import torch
import triton
import triton.language as tl

from engine.kernels.delta.plan import DeltaHeads
from engine.kernels.launch import Kernel

HEADS = 8


def gated_norm(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, heads: DeltaHeads, *, has_silu: bool = True
) -> torch.Tensor:
    num, dim = heads.num_value_heads, heads.value_dim
    result = torch.empty((out.shape[0], num * dim), dtype=out.dtype, device=out.device)
    fixed = (
        x.stride(0), num, heads.ratio, dim, triton.next_power_of_2(dim), heads.z.first, heads.z.step,
        has_silu, min(HEADS, triton.next_power_of_2(num)),
    )  # fmt: skip
    _GATE.launch((out.shape[0], triton.cdiv(num, fixed[-1])), (out.dtype, fixed), out, x, weight, result, eps, *fixed)
    return result


@triton.jit
def _gate(
    out_THD, x, weight_D, result_THD, eps,
    ROW: tl.constexpr, HV: tl.constexpr, RATIO: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr,
    Z: tl.constexpr, Z_STEP: tl.constexpr, HAS_SILU: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DV_PADDED)
    inside = (head < HV)[:, None] & (d < DV)[None, :]
    at = (row * HV + head)[:, None] * DV + d[None, :]
    dtype = result_THD.dtype.element_ty
    value = tl.load(out_THD + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=1) / DV + eps)[:, None]
    weight = tl.load(weight_D + d, mask=d < DV, other=0.0)[None, :]
    value = (weight * value.to(dtype)).to(tl.float32)
    column = Z + (head // RATIO * Z_STEP + head % RATIO * DV)[:, None] + d[None, :]
    z = tl.load(x + row * ROW + column, mask=inside, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-z))
    if HAS_SILU:
        gate *= z
    tl.store(result_THD + at, (value * gate).to(dtype), mask=inside)


_GATE = Kernel(_gate)
