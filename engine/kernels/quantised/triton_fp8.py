"""Triton versions of `fp8`, and the choice of a kernel by the number of rows. M rows, N outputs, K inputs.

Up to 64 rows go through the product of few rows in parts that add up to them. More are rounded, and the vendor's library
multiplies them where it can (`_library`); elsewhere the kernel here does, which scales each step's sum by its blocks.
"""

import functools

import torch
import triton
import triton.language as tl

from engine.kernels.activation import act_and_mul
from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.quantised import fp8
from engine.kernels.quantised.fp8 import FEW_ROWS, Fp8Matrix, Fp8Rows, Rounding, quantise_rows, rounding_of
from engine.kernels.quantised.triton_fp8_few import few_rows, rounded_few_rows

LIBRARY_MULTIPLE = 16  # inputs and outputs, with a scale for each row
LIBRARY_BLOCK = (128, 128)
SCALES_OF_16_BYTES = 4  # a row of scales begins at a multiple


def product(
    x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    return _product(_rounded(x, matrix), matrix, bias, out=out)


def product_parts(x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    return _product(_rounded(x, matrix), matrix, bias, partial=True)


def gated_product(
    x: torch.Tensor, gate_up: Fp8Matrix, bias: torch.Tensor | None, activation: str = "silu"
) -> torch.Tensor:
    return _gated(_rounded(x, gate_up), gate_up, bias, activation)


def product_of_rows(
    values: torch.Tensor,
    scale: torch.Tensor,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    partial: bool = False,
) -> torch.Tensor:
    return _product(Fp8Rows(values, scale, dtype), matrix, bias, partial=partial)


def gated_product_of_rows(
    values: torch.Tensor,
    scale: torch.Tensor,
    gate_up: Fp8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    activation: str = "silu",
) -> torch.Tensor:
    return _gated(Fp8Rows(values, scale, dtype), gate_up, bias, activation)


def rounded_gated_product(
    values: torch.Tensor,
    scale: torch.Tensor,
    gate_up: Fp8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    rounding: Rounding,
    activation: str = "silu",
) -> Fp8Rows:
    rows = Fp8Rows(values, scale, dtype)
    if values.dim() == 2:
        return fp8.gated_rows(many_rows(rows, gate_up, bias), rounding, activation)
    found = rounded_few_rows(rows, gate_up, bias, rounding, activation)
    return found or quantise_rows(_gated(rows, gate_up, bias, activation), rounding)


def _rounded(x: torch.Tensor, matrix: Fp8Matrix) -> Fp8Rows:
    return quantise_rows(x, rounding_of(matrix, len(x), x.dtype))


def _product(
    rows: Fp8Rows,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    if rows.values.dim() == 2:
        return many_rows(rows, matrix, bias, out=out)
    return few_rows(rows, matrix, bias, out=out, partial=partial)


def _gated(rows: Fp8Rows, gate_up: Fp8Matrix, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    if rows.values.dim() == 2:
        return act_and_mul(many_rows(rows, gate_up, bias), activation)
    return few_rows(rows, gate_up, bias, activation=activation)


def many_rows(
    x: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product of fp8 rows [T, N], in `out` if it is given."""
    if x.values.is_cuda and (found := _library(x, matrix, bias)) is not None:
        return found if out is None else out.copy_(found)
    if out is None:
        out = torch.empty((len(x), len(matrix.weight)), dtype=x.dtype, device=x.values.device)
    _launch_many(x, matrix, bias, out)
    return out


def _library(x: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The product by `torch._scaled_mm`, cuBLAS, or None where that refuses; scales of blocks need Hopper."""
    num_outputs, num_inputs = matrix.weight.shape
    if x.dtype != torch.bfloat16:
        return None
    if matrix.block is None:
        if num_inputs % LIBRARY_MULTIPLE or num_outputs % LIBRARY_MULTIPLE:
            return None
        return torch._scaled_mm(
            x.values, matrix.weight.T, scale_a=x.scale, scale_b=matrix.scale[None], bias=bias,
            out_dtype=x.dtype, use_fast_accum=True,
        )  # fmt: skip
    rows, inputs = LIBRARY_BLOCK
    whole = num_outputs % rows == 0 and num_inputs % (inputs * SCALES_OF_16_BYTES) == 0
    if matrix.block != LIBRARY_BLOCK or bias is not None or not whole or not _blocks_in_library(x.values.device):
        return None
    num_rows, padded = len(x), -(-len(x) // SCALES_OF_16_BYTES) * SCALES_OF_16_BYTES
    scale = x.scale.new_empty((num_inputs // inputs, padded))
    scale[:, :num_rows] = x.scale.T
    values = x.values
    if padded > num_rows:
        values = values.new_empty((padded, num_inputs))
        values[:num_rows].view(torch.uint8).copy_(x.values.view(torch.uint8))
    return torch._scaled_mm(
        values, matrix.weight.T, scale_a=scale.T, scale_b=matrix.scale.T, out_dtype=x.dtype, use_fast_accum=False
    )[:num_rows]


@functools.cache
def _blocks_in_library(device: torch.device) -> bool:
    """True if cuBLAS multiplies scales of 128 inputs: since CUDA 12.9, on Hopper alone."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return describe(device).is_hopper and version >= (12, 9)


def _launch_many(x: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    (num_rows, num_inputs), num_outputs = x.values.shape, out.shape[1]
    if num_rows == 0:
        return
    block = matrix.block or (1, num_inputs)
    step = 128 if matrix.block is None else min(128, block[1])
    rows = 128 if num_rows > FEW_ROWS else 64
    fixed = (
        num_outputs, num_inputs, block[0], block[1], matrix.block is not None, bias is not None, num_inputs % step != 0,
        rows, 128, step, 3,
    )  # fmt: skip
    _MANY.launch(
        (triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, 128)), (out.dtype, fixed),
        x.values, matrix.weight, out, out if bias is None else bias, x.scale, matrix.scale, num_rows, *fixed,
        num_warps=8 if rows == 128 else 4, num_stages=3,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _many_rows(
    x_MK, w_NK, out_MN, bias_N, x_scale, w_scale, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IN_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr, RAGGED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m_inside, n_inside = tl.minimum(m, M - 1), tl.minimum(n, N - 1)
    x_at = x_MK + m_inside.to(tl.int64)[:, None] * K + k[None, :]
    w_at = w_NK + n_inside.to(tl.int64)[:, None] * K + k[None, :]
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros((BM, BN), tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        if RAGGED:
            known = (at + k < K)[None, :]
            x = tl.load(x_at + at, mask=known, other=0.0)
            w = tl.load(w_at + at, mask=known, other=0.0)
        else:
            x, w = tl.load(x_at + at), tl.load(w_at + at)
        if IN_BLOCKS:
            column = at // BLOCK_K
            of_x = tl.load(x_scale + m_inside * COLUMNS + column)
            of_w = tl.load(w_scale + (n_inside // BLOCK_N) * COLUMNS + column)
            acc += tl.dot(x, tl.trans(w)) * of_x[:, None] * of_w[None, :]
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    if not IN_BLOCKS:
        acc = acc * tl.load(x_scale + m_inside)[:, None] * tl.load(w_scale + n_inside)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_N + n_inside).to(tl.float32)[None, :]
    target = out_MN + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(target, acc.to(out_MN.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


_MANY = Kernel(_many_rows)
