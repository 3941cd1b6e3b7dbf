"""Quantised keys and values: a number is its quantised value times a factor.

float16, without factors, is for models that compute in float32 on a CPU. fp8 (e4m3) has one factor for all keys of a layer and
one for all values. int8 has one for each head and token, its scale, which the pool keeps beside the codes. int4 has a scale and a
zero point for each, and two codes a byte, the first in the low half; its keys are `turned`. B block size, Hkv key and value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

MAX_FP8 = 448.0  # the largest number in e4m3
MAX_INT8 = 127.0
INT4_STEPS = 15  # between the smallest and the largest of a head

MAX_HALF = 65504.0  # the largest number in float16

Kind = Literal["float16", "fp8", "int8", "int4"]
# The dtypes of page parts, but for float16: codes, then scales, if any. Signed bytes travel as uint8, which every release knows.
KINDS: dict[Kind, tuple[str, ...]] = {
    "fp8": ("float8_e4m3fn",),
    "int8": ("uint8", "float32"),
    "int4": ("uint8", "bfloat16"),
}
LATENT_KINDS: tuple[Kind, ...] = ("fp8", "int8")  # those of MLA latents


def part_dims(kind: Kind, dim: int) -> tuple[tuple[str, int], ...]:
    """The dtype and size of each page part of heads with `dim` numbers."""
    if kind == "float16":
        return ((kind, dim),)
    sizes = (dim // 2, 2) if kind == "int4" else (dim, 1)
    return tuple(zip(KINDS[kind], sizes, strict=False))


@dataclass(frozen=True, slots=True)
class Codes:
    """The quantisation of a layer's part of the pool."""

    dtype: torch.dtype  # the dequantised dtype
    factors: torch.Tensor  # [2] float32, of fp8 keys and values; [1] for latents
    # [num_blocks, 2, B, Hkv, 1] float32, a view of the pool; of int4 [..., 2] bfloat16, scale and zero point. None: fp8.
    scales: torch.Tensor | None = None
    in_half: bool = False  # float16

    @property
    def kind(self) -> Kind:
        if self.in_half:
            return "float16"
        if self.scales is None:
            return "fp8"
        return "int8" if self.scales.dtype == torch.float32 else "int4"


def headless(kv_layer: torch.Tensor, codes: Codes | None) -> tuple[torch.Tensor, Codes | None]:
    """Return a layer's part of the pool without heads, and its quantisation, for queries that go the same way."""
    if codes is not None and codes.scales is not None:
        codes = replace(codes, scales=codes.scales[:, :, :, :0])
    return kv_layer[:, :, :, :0], codes


def head_dim(kv_layer: torch.Tensor, codes: Codes | None) -> int:
    """Return the numbers of a head in a layer's part of the pool."""
    return kv_layer.shape[-1] * (2 if codes is not None and codes.kind == "int4" else 1)


def encoded(x: torch.Tensor, plane: int, codes: Codes) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the codes of `x` [..., Hkv, D] as stored in the pool, keys in plane 0; and the scales, if the pool has any.

    What is beyond the range of floats becomes their largest number; NaN stays NaN.
    """
    if codes.in_half:
        return x.float().clamp(-MAX_HALF, MAX_HALF).half(), None
    if codes.scales is None:
        return (x.float() / codes.factors[plane]).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn), None
    if codes.kind == "int4":
        return _in_int4(x.float())
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    steps = torch.where(largest > 0, MAX_INT8 / largest, 0.0)
    return (x.float() * steps).round().to(torch.int8).view(torch.uint8), largest / MAX_INT8


def _in_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [..., D / 2] and scales [..., 2]. Codes are rounded by the scales as the pool keeps them."""
    smallest, largest = x.aminmax(dim=-1, keepdim=True)
    step = ((largest - smallest) * (1 / INT4_STEPS)).bfloat16()
    zero = (0.5 * (smallest + largest) + 0.5 * step.float()).bfloat16()
    steps = torch.where(step > 0, 1 / step.float(), 0.0)
    numbers = ((x - zero.float()) * steps).round().clamp(-8, 7).to(torch.int8)
    low, high = (numbers + 8).view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, torch.cat((step, zero), dim=-1)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return the product of `x` [..., D] and a Hadamard matrix, so that no few features are much larger than others.

    Of int4, keys and queries are turned, which leaves their products as they are. The matrix has blocks of the largest power of
    two that divides D. Sums are by pairs, so a row never depends on its batch.
    """
    size = x.shape[-1] & -x.shape[-1]
    wide = x.float().unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
        wide = torch.cat((first + second, first - second), dim=-1)
    return (wide.flatten(-2) * size**-0.5).to(x.dtype)


def coded(numbers: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, Codes]:
    """Return a pool of codes of `numbers` [num_blocks, 2, B, Hkv, D], with factors of 1, for tests and benchmarks."""
    pages, *scales = (
        torch.empty((*numbers.shape[:-1], dim), dtype=getattr(torch, dtype), device=numbers.device)
        for dtype, dim in part_dims(kind, numbers.shape[-1])
    )
    factors, in_half = torch.ones(2, device=numbers.device), kind == "float16"
    codes = Codes(numbers.dtype, factors, scales[0] if scales else None, in_half=in_half)
    for plane in (0, 1):
        kept, steps = encoded(numbers[:, plane], plane, codes)
        pages[:, plane] = kept
        if codes.scales is not None and steps is not None:
            codes.scales[:, plane] = steps
    return pages, codes


def decoded(pages: torch.Tensor, scales: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantised values [..., D] of codes."""
    if pages.dtype == torch.float16:
        return pages.to(dtype)
    if scales is None:
        half = _in_half(pages)
        return (pages.float() * factor).to(dtype) if half is None else (half.float() * (factor * 256)).to(dtype)
    if scales.dtype == torch.float32:
        return (pages.view(torch.int8).float() * scales).to(dtype)
    step, zero = scales.float().split(1, dim=-1)
    numbers = torch.stack((pages & 15, pages >> 4), dim=-1).flatten(-2)
    return ((numbers.float() - 8) * step + zero).to(dtype)


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
    if factors is None:
        return pages, None
    return pages, Codes(dtype, factors, scales[0] if scales else None, in_half=pages.dtype == torch.float16)
