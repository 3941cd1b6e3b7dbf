"""Triton version of `layer_norm`: one program a row. T rows, E features, P partial sums, V rows of a table."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.texts.layer_norm import MOST_TABLES, Rows
from engine.kernels.triton_norm import sum_of_parts


def norm_of_sum(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    keeps_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    residual = residual.contiguous()
    num_rows, num_features = residual.shape
    parts = 0 if x is None else x.shape[0] if x.dim() > residual.dim() else 1
    rows, keeps = residual if x is None else x.contiguous(), keeps_sum and x is not None
    out = torch.empty_like(residual)
    total = torch.empty_like(residual) if keeps else out
    if num_rows:
        pdl, width = describe(residual.device).has_tma, triton.next_power_of_2(num_features)
        fixed = (num_features, width, parts, bias is not None, keeps, pdl)
        _OF_SUM.launch(
            (num_rows,), (residual.dtype, rows.dtype, *fixed),
            rows, residual, weight, weight if bias is None else bias, out, total, num_rows, eps, *fixed,
            num_warps=_warps(width), launch_pdl=pdl,
        )  # fmt: skip
    return out, total if keeps else residual if keeps_sum else None


def norm_of_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, eps: float, tables: Sequence[Rows], multiplier: float
) -> torch.Tensor:
    (first, numbers), num_features = tables[0], len(weight)
    out = first.new_empty((len(numbers), num_features))
    if len(numbers):
        pdl, width = describe(first.device).has_tma, triton.next_power_of_2(num_features)
        every = [*tables, *[tables[0]] * (MOST_TABLES - len(tables))]
        aligned = tuple(rows.data_ptr() % 16 == 0 for _, rows in every)
        fixed = (num_features, width, len(tables), multiplier, bias is not None, pdl)
        _OF_ROWS.launch(
            (len(numbers),), (first.dtype, aligned, *fixed),
            *(one for both in every for one in both), weight, weight if bias is None else bias, out, eps, *fixed,
            num_warps=_warps(width), launch_pdl=pdl,
        )  # fmt: skip
    return out


def _warps(width: int) -> int:
    return 8 if width >= 4096 else 4 if width > 512 else 2


@triton.jit(do_not_specialize=["num_rows"])
def _of_sum(
    x_PTE, residual_TE, weight_E, bias_E, out_TE, total_TE, num_rows, eps,
    NUM_FEATURES: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, KEEPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * NUM_FEATURES
    at = tl.arange(0, E)
    inside = at < NUM_FEATURES
    weight, bias = _affine(weight_E + at, bias_E + at, inside, HAS_BIAS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(residual_TE + row + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        total += sum_of_parts(x_PTE + row + at, inside, num_rows.to(tl.int64) * NUM_FEATURES, PARTS).to(tl.float32)
    if KEEPS:
        tl.store(total_TE + row + at, total.to(total_TE.dtype.element_ty), mask=inside)
    normed = _normed(total, inside, weight, bias, eps, NUM_FEATURES)
    tl.store(out_TE + row + at, normed.to(out_TE.dtype.element_ty), mask=inside)


@triton.jit
def _of_rows(
    first_VE, first_T, second_VE, second_T, third_VE, third_T, weight_E, bias_E, out_TE, eps,
    NUM_FEATURES: tl.constexpr, E: tl.constexpr, TABLES: tl.constexpr, MULTIPLIER: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, E)
    inside = at < NUM_FEATURES
    weight, bias = _affine(weight_E + at, bias_E + at, inside, HAS_BIAS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(first_T + row).to(tl.int64) * NUM_FEATURES
    total = tl.load(first_VE + number + at, mask=inside, other=0.0).to(tl.float32) * MULTIPLIER
    if TABLES > 1:
        number = tl.load(second_T + row).to(tl.int64) * NUM_FEATURES
        total += tl.load(second_VE + number + at, mask=inside, other=0.0).to(tl.float32)
    if TABLES > 2:
        number = tl.load(third_T + row).to(tl.int64) * NUM_FEATURES
        total += tl.load(third_VE + number + at, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(total, inside, weight, bias, eps, NUM_FEATURES)
    tl.store(out_TE + row * NUM_FEATURES + at, normed.to(out_TE.dtype.element_ty), mask=inside)


@triton.jit
def _affine(weight_E, bias_E, inside, HAS_BIAS: tl.constexpr):
    """Weight and bias [E] float32, 0 beyond the features."""
    weight = tl.load(weight_E, mask=inside, other=0.0).to(tl.float32)
    bias = weight * 0.0
    if HAS_BIAS:
        bias = tl.load(bias_E, mask=inside, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def _normed(total, inside, weight, bias, eps, NUM_FEATURES: tl.constexpr):
    """The LayerNorm of a row [E] float32, 0 beyond NUM_FEATURES."""
    away = tl.where(inside, total - tl.sum(total, axis=0) / NUM_FEATURES, 0.0)
    return away * tl.rsqrt(tl.sum(away * away, axis=0) / NUM_FEATURES + eps) * weight + bias


_OF_SUM, _OF_ROWS = Kernel(_of_sum), Kernel(_of_rows)
