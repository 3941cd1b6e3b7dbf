"""Triton versions of `norm`: one program a row. T rows, E features, P partial sums."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.launch import Kernel

PLAIN, PLUS_ONE, NO_WEIGHT = 0, 1, 2  # the factor of a normed value


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, plus_one: bool = False) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    if weight is None:
        _launch(rows, rows, rows, out, out, eps, parts=0, kind=NO_WEIGHT)
    else:
        _launch(rows, rows, weight, out, out, eps, parts=0, kind=PLUS_ONE if plus_one else PLAIN)
    return out.view(x.shape)


def add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = x.shape[0] if x.dim() > residual.dim() else 1
    rows, other = x.reshape(-1, x.shape[-1]).contiguous(), residual.reshape(-1, x.shape[-1]).contiguous()
    out, total = torch.empty_like(other), torch.empty_like(other)
    _launch(rows, other, weight, out, total, eps, parts=parts, kind=PLUS_ONE if plus_one else PLAIN)
    return out.view(residual.shape), total.view(residual.shape)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    parts: int,
    kind: int,
) -> None:
    num_rows, num_features = out.shape
    if num_rows == 0:
        return
    pdl = describe(x.device).has_tma
    width = triton.next_power_of_2(num_features)
    _NORM.launch(
        (num_rows,), (x.dtype, out.dtype, num_features, parts, kind, pdl),
        x, residual, weight, out, total, num_rows, eps, num_features, width, parts, kind, pdl,
        num_warps=8 if width >= 4096 or parts > 4 else 4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def norm_row(
    x, residual, total, weight, num_rows, eps,
    NUM_FEATURES: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return a normed row [E] and write its sum with the residual. The pointers are at the row; weights [E] are loaded already.

    PARTS = 0: no residual. KIND: PLAIN, PLUS_ONE or NO_WEIGHT.
    """
    at = tl.arange(0, E)
    inside = at < NUM_FEATURES
    values = sum_of_parts(x + at, inside, num_rows.to(tl.int64) * NUM_FEATURES, PARTS).to(residual.dtype.element_ty)
    if PARTS > 0:
        values = values + tl.load(residual + at, mask=inside, other=0.0)
        tl.store(total + at, values, mask=inside)
    return normed(values, weight, eps, NUM_FEATURES, KIND)


@triton.jit
def sum_of_parts(x, inside, stride, PARTS: tl.constexpr):
    """Return the values at `x`, or the float32 sum of PARTS that lie `stride` apart."""
    values = tl.load(x, mask=inside, other=0.0)
    if PARTS > 1:
        values = values.to(tl.float32)
    for part in tl.static_range(1, PARTS):
        values += tl.load(x + part * stride, mask=inside, other=0.0)
    return values


@triton.jit
def normed(values, weight, eps, NUM_FEATURES: tl.constexpr, KIND: tl.constexpr):
    """Return `values` [E], 0 beyond NUM_FEATURES, over their root mean square; see `norm_row`."""
    wide = values.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / NUM_FEATURES + eps)
    if KIND == 0:
        wide = weight * wide.to(values.dtype)
    elif KIND == 1:
        wide = wide * (1.0 + weight.to(tl.float32))
    return wide.to(values.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    x_PTE, residual_TE, weight_E, out_TE, total_TE, num_rows, eps,
    NUM_FEATURES: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * NUM_FEATURES
    at = tl.arange(0, E)
    inside = at < NUM_FEATURES
    if KIND != 2:
        weight = tl.load(weight_E + at, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row_E = norm_row(
        x_PTE + row, residual_TE + row, total_TE + row, weight if KIND != 2 else eps, num_rows, eps,
        NUM_FEATURES, E, PARTS, KIND,
    )  # fmt: skip
    tl.store(out_TE + row + at, row_E, mask=inside)


_NORM = Kernel(_norm)
