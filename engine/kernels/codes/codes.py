"""Quantised keys and values: a number is its quantised value times a factor.

fp8 (e4m3) has one factor for all keys of a layer and one for all values. int8 has one for each head and token, its scale, which
the pool keeps beside the codes. B block size, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

MAX_FP8 = 448.0  # the largest number in e4m3
MAX_INT8 = 127.0

Kind = Literal["fp8", "int8"]
# The dtypes of page parts: codes, then scales, if any. Signed bytes travel as uint8, which every release knows.
KINDS: dict[Kind, tuple[str, ...]] = {"fp8": ("float8_e4m3fn",), "int8": ("uint8", "float32")}


@dataclass(frozen=True, slots=True)
class Codes:
    """The quantisation of a layer's part of the pool."""

    dtype: torch.dtype  # the dequantised dtype
    factors: torch.Tensor  # [2] float32, of fp8 keys and values; [1] for latents
    # [num_blocks, 2, B, Hkv, 1] float32, a view of the pool. None: the codes are fp8.
    scales: torch.Tensor | None = None


def encoded(x: torch.Tensor, plane: int, codes: Codes) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the codes of `x` [..., Hkv, D] as stored in the pool, keys in plane 0; for int8 also the scales [..., Hkv, 1].

    What is beyond fp8's range becomes its largest number; NaN stays NaN.
    """
    if codes.scales is None:
        return (x.float() / codes.factors[plane]).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn), None
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    steps = torch.where(largest > 0, MAX_INT8 / largest, 0.0)
    return (x.float() * steps).round().to(torch.int8).view(torch.uint8), largest / MAX_INT8


def coded(numbers: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, Codes]:
    """Return a pool of codes of `numbers` [num_blocks, 2, B, Hkv, D], with factors of 1, for tests and benchmarks."""
    dtypes = [getattr(torch, name) for name in KINDS[kind]]
    pages = torch.empty(numbers.shape, dtype=dtypes[0], device=numbers.device)
    scales = [torch.empty((*numbers.shape[:-1], 1), dtype=dtype, device=numbers.device) for dtype in dtypes[1:]]
    codes = Codes(numbers.dtype, torch.ones(2, device=numbers.device), *scales)
    for plane in (0, 1):
        kept, steps = encoded(numbers[:, plane], plane, codes)
        pages[:, plane] = kept
        if codes.scales is not None and steps is not None:
            codes.scales[:, plane] = steps
    return pages, codes


def decoded(pages: torch.Tensor, scales: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantised values of codes [..., D]."""
    if scales is None:
        half = _in_half(pages)
        return (pages.float() * factor).to(dtype) if half is None else (half.float() * (factor * 256)).to(dtype)
    return (pages.view(torch.int8).float() * scales).to(dtype)


def _in_half(pages: torch.Tensor) -> torch.Tensor | None:
    """A CPU's fp8 as float16, scaled by 2^-8: a bit shift, as torch converts one by one. None if inapplicable."""
    if pages.is_cuda or not pages.numel():
        return None
    raw = pages.view(torch.int8)
    if int(raw.bitwise_and(0x7F).amax()) == 0x7F:  # NaN
        return None
    return raw.to(torch.int16).mul_(128).bitwise_and_(0xBF80 - 0x10000).view(torch.float16)


def numbers_of(kv_layer: torch.Tensor, blocks: torch.Tensor, codes: Codes | None) -> torch.Tensor:
    """Return the dequantised keys and values of these blocks, [*blocks.shape, 2, B, Hkv, D]."""
    flat = blocks.flatten()
    pages = kv_layer.index_select(0, flat)
    if codes is not None:
        scales = None if codes.scales is None else codes.scales.index_select(0, flat)
        pages = decoded(pages, scales, codes.factors.view(2, 1, 1, 1), codes.dtype)
    return pages.unflatten(0, blocks.shape)


def opened(
    kept: Sequence[torch.Tensor], factors: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, Codes | None]:
    """Return a layer's part of the pool and its quantisation; `factors` None: it is unquantised."""
    pages, *scales = kept
    return pages, None if factors is None else Codes(dtype, factors, scales[0] if scales else None)
