"""Triton version of `gate`: one group of a token's numbers in a program."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel
from engine.kernels.mamba.heads import MambaHeads

SIZE_OF_FOUR_WARPS = 2048


def gate(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, heads: MambaHeads
) -> torch.Tensor:
    result = torch.empty_like(out)
    size = heads.size // heads.norm_groups
    padded = triton.next_power_of_2(size)
    fixed = (x.stride(0), heads.size, size, padded, weight is not None and heads.norm == "after", weight is not None)
    _GATE.launch(
        (out.shape[0], heads.norm_groups), (out.dtype, fixed),
        out, x, out if weight is None else weight, result, eps, *fixed,
        num_warps=4 if padded <= SIZE_OF_FOUR_WARPS else 8,
    )  # fmt: skip
    return result


@triton.jit
def _gate(
    out_TD, x, weight_D, result_TD, eps,
    ROW: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, IS_FIRST: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside, at = d < SIZE, tl.program_id(1) * SIZE + d
    value = tl.load(out_TD + row * D + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(x + row * ROW + at, mask=inside, other=0.0).to(tl.float32)
    z = z / (1.0 + tl.exp(-z))
    if IS_FIRST:
        value *= z
    if HAS_NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
        value *= tl.load(weight_D + at, mask=inside, other=0.0).to(tl.float32)
    if not IS_FIRST:
        value *= z
    tl.store(result_TD + row * D + at, value.to(result_TD.dtype.element_ty), mask=inside)


_GATE = Kernel(_gate)
