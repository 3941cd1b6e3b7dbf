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
    aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.histc,
}  # fmt: skip
MOVES = {aten.to, aten._to_copy}
BY_INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class CardError(AssertionError):
    """What a card would not do, or not as it is meant."""


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Any = None,
    scale_result: Any = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    """With a scale for each row, as torch 2.11 to 2.13 have it in native/cuda/Blas.cpp and ScaledBlas.cpp."""
    problems = {
        "the first is not in rows": a.stride(1) != 1 or a.stride(0) < a.shape[1] or a.stride(0) % 16,
        "the second is not in columns": b.stride(0) != 1 or b.stride(1) < b.shape[0] or b.stride(1) % 16,
        "sizes are no multiples of 16": b.shape[0] % 16 or b.shape[1] % 16,
        "scales of the first": scale_a.shape != (a.shape[0], 1) or scale_a.dtype != torch.float32,
        "scales of the second": scale_b.shape != (1, b.shape[1]) or scale_b.dtype != torch.float32,
        "scales are not contiguous": not (scale_a.is_contiguous() and scale_b.is_contiguous()),
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


# What a card computes and a CPU does not, or what a card's library refuses.
ON_CARD: dict[Any, Callable[..., torch.Tensor]] = {
    aten._scaled_mm.default: _scaled_mm,
    aten.mm.dtype: _mm_in_float32,
}
