"""Triton versions of `norm`: one program a row. T rows, E features."""

import torch
import triton
import triton.language as tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    _norm[(rows.shape[0],)](
        rows, rows, weight, out, out, rows.shape[1], eps, HAS_RESIDUAL=False, E=triton.next_power_of_2(rows.shape[1])
    )
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, other = x.reshape(-1, x.shape[-1]).contiguous(), residual.reshape(-1, x.shape[-1]).contiguous()
    out, total = torch.empty_like(rows), torch.empty_like(rows)
    _norm[(rows.shape[0],)](
        rows, other, weight, out, total, rows.shape[1], eps, HAS_RESIDUAL=True, E=triton.next_power_of_2(rows.shape[1])
    )
    return out.view(x.shape), total.view(x.shape)


@triton.jit
def _norm(
    x_TE, residual_TE, weight_E, out_TE, total_TE, num_features, eps, HAS_RESIDUAL: tl.constexpr, E: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * num_features
    at = tl.arange(0, E)
    inside = at < num_features
    x = tl.load(x_TE + row + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        x = x + tl.load(residual_TE + row + at, mask=inside, other=0.0)
        tl.store(total_TE + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / num_features + eps)
    weight = tl.load(weight_E + at, mask=inside, other=0.0)
    tl.store(out_TE + row + at, weight * (wide * scale).to(x.dtype), mask=inside)
