# mypy: allow-untyped-calls
"""What the card of `card` refuses or computes otherwise than a CPU, among torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
# Their results' shapes, or Python itself, depend on numbers that the card has.
WAITS = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose, aten.nonzero, aten.argwhere,
    aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount,
}  # fmt: skip
MOVES = {aten.to, aten._to_copy}
BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class CardError(AssertionError):
    """What a card would not do, or not as it is meant."""


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Any = None,
    scale_result: Any = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    """With a scale for each row, or blocks of 128, as torch 2.11 to 2.13 have it in native/cuda/ScaledBlas.cpp."""
    (m, k), n = a.shape, b.shape[1]
    if in_blocks := scale_b.shape != (1, n):
        scales = {
            "scales of the first": scale_a.shape != (m, k // 128) or scale_a.stride(0) != 1 or scale_a.stride(1) != m,
            "scales of the second": scale_b.shape != (k // 128, n // 128) or scale_b.stride() != (1, k // 128),
            "scales that begin anywhere": m % 4 or k % 512,
            "a bias or fast sums beside blocks": bias is not None or use_fast_accum,
        }
    else:
        scales = {
            "scales of the first": scale_a.shape != (m, 1),
            "scales of the second": scale_b.shape != (1, n),
            "scales are not contiguous": not (scale_a.is_contiguous() and scale_b.is_contiguous()),
        }
    problems = scales | {
        "the first is not in rows": a.stride(1) != 1 or a.stride(0) < a.shape[1] or a.stride(0) % 16,
        "the second is not in columns": b.stride(0) != 1 or b.stride(1) < b.shape[0] or b.stride(1) % 16,
        "sizes are no multiples of 16, or of blocks": k % 16 or n % (128 if in_blocks else 16),
        "scales are no float32": {scale_a.dtype, scale_b.dtype} != {torch.float32},
        "a result that is not bfloat16": out_dtype != torch.bfloat16,
        "a bias of another dtype": bias is not None and bias.dtype != out_dtype,
        "addresses are no multiples of 16": a.data_ptr() % 16 or b.data_ptr() % 16,
    }
    if wrong := [problem for problem, is_so in problems.items() if is_so]:
        raise CardError(f"_scaled_mm: {', '.join(wrong)}")
    return torch.zeros((a.shape[0], b.shape[1]), dtype=out_dtype)


def _mm_in_float32(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if out_dtype != torch.float32 or a.dtype not in (torch.float16, torch.bfloat16) or a.dtype != b.dtype:
        raise CardError(f"mm of {a.dtype} and {b.dtype} as {out_dtype}")
    return a.float() @ b.float()


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """A histogram as the card counts it: whole numbers too, and bounds that it need not ask for."""
    if min == max:
        raise CardError("histc without bounds waits for the card")
    return x.float().histc(bins, min, max).to(x.dtype)


# What a card computes and a CPU does not, or what a card's library refuses.
ON_CARD: dict[Any, Callable[..., torch.Tensor]] = {
    aten._scaled_mm.default: _scaled_mm,
    aten.mm.dtype: _mm_in_float32,
    aten.histc.default: _histc,
}
