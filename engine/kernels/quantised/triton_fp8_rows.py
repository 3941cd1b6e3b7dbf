"""Triton versions of what makes 8-bit rows: one program a row. T rows, K inputs, G inputs of a scale."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Kernel
from engine.kernels.quantised.fp8 import FP8, Fp8Rows
from engine.kernels.triton_activation import activated
from engine.kernels.triton_norm import PLAIN, PLUS_ONE, norm_row


def quantise_rows(x: torch.Tensor, group: int | None = None) -> Fp8Rows:
    num_rows, num_inputs = x.shape
    rows = _empty_rows(x, num_inputs, group)
    if num_rows:
        width = triton.next_power_of_2(num_inputs)
        fixed = (x.stride(0), num_inputs, width, _group(width, num_inputs, group))
        _ROWS.launch((num_rows,), (x.dtype, fixed), x, rows.values, rows.scale, *fixed, num_warps=warps_of(width))
    return rows


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


def normed_rows(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    group: int | None = None,
) -> tuple[Fp8Rows, torch.Tensor]:
    residual = residual.contiguous()
    num_rows, num_features = residual.shape
    parts = 0 if x is None else x.shape[0] if x.dim() > residual.dim() else 1
    added = residual if x is None else x.contiguous()
    total = residual if x is None else torch.empty_like(residual)
    rows = _empty_rows(residual, num_features, group)
    if num_rows:
        width = triton.next_power_of_2(num_features)
        kind = PLUS_ONE if plus_one else PLAIN
        fixed = (num_features, width, parts, kind, _group(width, num_features, group))
        _NORMED.launch(
            (num_rows,), (added.dtype, residual.dtype, fixed),
            added, residual, weight, total, rows.values, rows.scale, num_rows, eps, *fixed,
            num_warps=8 if width < 16384 else 16,
        )  # fmt: skip
    return rows, total


@triton.jit(do_not_specialize=["num_rows"])
def _normed(
    x_PTE, residual_TE, weight_E, total_TE, values_TE, scale_TG, num_rows, eps,
    NUM_FEATURES: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As `triton_norm._norm`, rounded."""
    index = tl.program_id(0).to(tl.int64)
    row = index * NUM_FEATURES
    at = tl.arange(0, E)
    weight = tl.load(weight_E + at, mask=at < NUM_FEATURES, other=0.0)
    normed = norm_row(
        x_PTE + row, residual_TE + row, total_TE + row, weight, num_rows, eps, NUM_FEATURES, E, PARTS, KIND
    )  # fmt: skip
    write_rounded(normed.to(tl.float32), values_TE + row, scale_TG, index, NUM_FEATURES, E, GROUP)


def gated_rows(gate_up: torch.Tensor, activation: str = "silu", group: int | None = None) -> Fp8Rows:
    gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    rows = _empty_rows(gate_up, size, group)
    if num_rows:
        width = triton.next_power_of_2(size)
        fixed = (size, width, activation == "gelu_tanh", _group(width, size, group))
        _GATED.launch(
            (num_rows,), (gate_up.dtype, fixed), gate_up, rows.values, rows.scale, *fixed, num_warps=warps_of(width)
        )
    return rows


@triton.jit
def _gated(gate_up, values, scale_TG, SIZE: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr, GROUP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    result = (activated(gate, GELU) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    write_rounded(result, values + row * SIZE, scale_TG, row, SIZE, WIDTH, GROUP)


def _empty_rows(x: torch.Tensor, num_inputs: int, group: int | None) -> Fp8Rows:
    values = torch.empty((x.shape[0], num_inputs), dtype=FP8, device=x.device)
    scale = torch.empty((x.shape[0], num_inputs // (group or num_inputs)), dtype=torch.float32, device=x.device)
    return Fp8Rows(values, scale, x.dtype)


def _group(width: int, num_inputs: int, group: int | None) -> int:
    """Numbers of a program's that have one scale."""
    return group if group is not None and group < num_inputs else width


_ROWS, _NORMED, _GATED = Kernel(_rows), Kernel(_normed), Kernel(_gated)
