"""Triton versions of what makes 8-bit rows: one program a row. T rows, K inputs, G inputs of a scale."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel
from engine.kernels.quantised.fp8 import FP8, Fp8Rows


def quantise_rows(x: torch.Tensor, group: int | None = None) -> Fp8Rows:
    num_rows, num_inputs = x.shape
    group = group or num_inputs
    values = torch.empty((num_rows, num_inputs), dtype=FP8, device=x.device)
    scale = torch.empty((num_rows, num_inputs // group), dtype=torch.float32, device=x.device)
    if num_rows:
        width = triton.next_power_of_2(num_inputs)
        fixed = (x.stride(0), num_inputs, width, group if group < num_inputs else width)
        _ROWS.launch((num_rows,), (x.dtype, fixed), x, values, scale, *fixed, num_warps=warps_of(width))
    return Fp8Rows(values, scale, x.dtype)


def warps_of(width: int) -> int:
    """Of a program that holds so many numbers."""
    return 4 if width < 4096 else 8 if width < 16384 else 16


@triton.jit
def _rows(x_TK, values_TK, scale_TG, ROW: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    x = tl.load(x_TK + row * ROW + at, mask=at < K, other=0.0).to(tl.float32)
    write_rounded(x, values_TK + row * K, scale_TG, row, K, WIDTH, GROUP)


@triton.jit
def write_rounded(x, values, scale_TG, row, K: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Write `x` [WIDTH] float32, 0 beyond K, to `values` with scales of groups; GROUP = WIDTH: one for the row."""
    at = tl.arange(0, WIDTH)
    if GROUP == WIDTH:
        scale = tl.maximum(tl.max(tl.abs(x), axis=0) / 448.0, 1e-12)
        rounded = x / scale
        tl.store(scale_TG + row, scale)
    else:
        COUNT: tl.constexpr = WIDTH // GROUP
        groups = tl.reshape(x, (COUNT, GROUP))
        scale = tl.maximum(tl.max(tl.abs(groups), axis=1) / 448.0, 1e-12)
        rounded = tl.reshape(groups / scale[:, None], (WIDTH,))
        g = tl.arange(0, COUNT)
        tl.store(scale_TG + row * (K // GROUP) + g, scale, mask=g < K // GROUP)
    rounded = tl.minimum(tl.maximum(rounded, -448.0), 448.0)
    tl.store(values + at, rounded.to(values.dtype.element_ty), mask=at < K)


_ROWS = Kernel(_rows)
