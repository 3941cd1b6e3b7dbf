"""Triton versions of fp8 row quantisation: one program a row. T rows, K inputs, G inputs of a scale, P parts."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.quantised.fp8 import FP8, TO_ROWS, Fp8Rows, Rounding
from engine.kernels.quantised.triton_fp8_parts import first_part, scale_and_inverse
from engine.kernels.triton_activation import activated
from engine.kernels.triton_norm import PLAIN, PLUS_ONE, norm_row

# Groups of a program; rows split into parts are few, so programs are kept small.
GROUPS_OF_A_PROGRAM = 8


def quantise_rows(x: torch.Tensor, rounding: Rounding = TO_ROWS) -> Fp8Rows:
    num_rows, num_inputs = x.shape
    rows = _empty_rows(x, num_inputs, rounding)
    if not num_rows:
        return rows
    group, programs, pdl = rounding.group, 1, describe(x.device).has_tma
    width = triton.next_power_of_2(num_inputs)
    if rounding.parts > 1 and group is not None:
        width = min(width, GROUPS_OF_A_PROGRAM * group)
        programs = triton.cdiv(num_inputs, width)
    fixed = (
        x.stride(0), num_inputs, width, _group(width, num_inputs, group), rounding.parts, rounding.for_codes, pdl,
    )  # fmt: skip
    _ROWS.launch(
        (num_rows, programs), (x.dtype, fixed), x, rows.values, rows.scale, *fixed,
        num_warps=warps_of(width), launch_pdl=pdl,
    )  # fmt: skip
    return rows


def warps_of(width: int) -> int:
    """Return the warps of a program with so many elements."""
    return 4 if width < 4096 else 8 if width < 16384 else 16


@triton.jit
def _rows(
    x_TK, values_TPK, scale_TG,
    ROW: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, CODES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * WIDTH
    at = begin + tl.arange(0, WIDTH)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_TK + row * ROW + at, mask=at < K, other=0.0).to(tl.float32)
    write_rounded(x, values_TPK + row * P * K, scale_TG, row, begin, K, WIDTH, GROUP, P, CODES)


@triton.jit
def write_rounded(
    x, values_PK, scale_TG, row, begin,
    K: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Write `x` [WIDTH] float32, the inputs from `begin` on, 0 beyond K, with group scales.

    GROUP = WIDTH: one for the row. CODES: `Rounding.for_codes`.
    """
    at = begin + tl.arange(0, WIDTH)
    COUNT: tl.constexpr = WIDTH // GROUP
    if CODES:
        x = tl.permute(tl.reshape(x, (WIDTH // 128, 4, 32)), (0, 2, 1))
    groups = tl.reshape(x, (COUNT, GROUP))
    largest = tl.max(tl.abs(groups), axis=1)
    g = begin // GROUP + tl.arange(0, COUNT)
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    scale_at = scale_TG + row * GROUPS + g
    if CODES:
        num_rows = tl.num_programs(0)
        scale_at = scale_TG + g * num_rows + row
    if P > 1:
        scale, inverse = scale_and_inverse(largest)
        rest = tl.reshape(groups * inverse[:, None], (WIDTH,))
        for part in tl.static_range(P):
            rounded = first_part(rest) if part < P - 1 else rest
            rest -= rounded
            tl.store(values_PK + part * K + at, rounded.to(values_PK.dtype.element_ty), mask=at < K)
    else:
        scale = tl.maximum(largest / 448.0, 1e-12)
        rounded = tl.reshape(groups / scale[:, None], (WIDTH,))
        rounded = tl.minimum(tl.maximum(rounded, -448.0), 448.0)
        tl.store(values_PK + at, rounded.to(values_PK.dtype.element_ty), mask=at < K)
    tl.store(scale_at, scale, mask=g * GROUP < K)
    if CODES:
        tl.store(scale_at + GROUPS * num_rows, tl.sum(groups, axis=1), mask=g * GROUP < K)


def normed_rows(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    rounding: Rounding,
    *,
    plus_one: bool = False,
) -> tuple[Fp8Rows, torch.Tensor]:
    residual = residual.contiguous()
    num_rows, num_features = residual.shape
    parts = 0 if x is None else x.shape[0] if x.dim() > residual.dim() else 1
    added = residual if x is None else x.contiguous()
    total = residual if x is None else torch.empty_like(residual)
    rows = _empty_rows(residual, num_features, rounding)
    if num_rows:
        width = triton.next_power_of_2(num_features)
        kind = PLUS_ONE if plus_one else PLAIN
        pdl = describe(residual.device).has_tma
        group = _group(width, num_features, rounding.group)
        fixed = (num_features, width, parts, kind, group, rounding.parts, rounding.for_codes, pdl)
        _NORMED.launch(
            (num_rows,), (added.dtype, residual.dtype, fixed),
            added, residual, weight, total, rows.values, rows.scale, num_rows, eps, *fixed,
            num_warps=_warps_of_norm(width, rounding), launch_pdl=pdl,
        )  # fmt: skip
    return rows, total


def _warps_of_norm(width: int, rounding: Rounding) -> int:
    """Warps of a norm: with parts 8 elements a thread, since 16 would be exchanged through shared memory."""
    if rounding.parts > 1:
        return min(max(width // 256, 4), 32)
    return 8 if width < 16384 else 16


@triton.jit(do_not_specialize=["num_rows"])
def _normed(
    x_PTE, residual_TE, weight_E, total_TE, values, scale_TG, num_rows, eps,
    NUM_FEATURES: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    P: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `triton_norm._norm`, quantised. PARTS: partial sums of x."""
    index = tl.program_id(0).to(tl.int64)
    row = index * NUM_FEATURES
    at = tl.arange(0, E)
    weight = tl.load(weight_E + at, mask=at < NUM_FEATURES, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    normed = norm_row(
        x_PTE + row, residual_TE + row, total_TE + row, weight, num_rows, eps, NUM_FEATURES, E, PARTS, KIND
    )  # fmt: skip
    write_rounded(normed.to(tl.float32), values + row * P, scale_TG, index, 0, NUM_FEATURES, E, GROUP, P, CODES)


def gated_rows(gate_up: torch.Tensor, rounding: Rounding, activation: str = "silu") -> Fp8Rows:
    gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    rows = _empty_rows(gate_up, size, rounding)
    if num_rows:
        width, pdl = triton.next_power_of_2(size), describe(gate_up.device).has_tma
        group = _group(width, size, rounding.group)
        fixed = (size, width, activation == "gelu_tanh", group, rounding.parts, rounding.for_codes, pdl)
        _GATED.launch(
            (num_rows,), (gate_up.dtype, fixed), gate_up, rows.values, rows.scale, *fixed,
            num_warps=warps_of(width), launch_pdl=pdl,
        )  # fmt: skip
    return rows


@triton.jit
def _gated(
    gate_up, values, scale_TG,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, CODES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    result = (activated(gate, GELU) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    write_rounded(result, values + row * P * SIZE, scale_TG, row, 0, SIZE, WIDTH, GROUP, P, CODES)


def _empty_rows(x: torch.Tensor, num_inputs: int, rounding: Rounding) -> Fp8Rows:
    values = torch.empty(rounding.shape(len(x), num_inputs), dtype=FP8, device=x.device)
    scale = torch.empty(rounding.shape_of_scales(len(x), num_inputs), dtype=torch.float32, device=x.device)
    return Fp8Rows(values, scale, x.dtype)


def _group(width: int, num_inputs: int, group: int | None) -> int:
    """Elements of a program that share a scale."""
    return group if group is not None and group < num_inputs else width


_ROWS, _NORMED, _GATED = Kernel(_rows), Kernel(_normed), Kernel(_gated)
