"""Triton versions of `absorbed.write_latents` and `absorbed.rotate_queries`: a program a token.

T tokens, Hq query heads, C size of the latents, R size of the rotated part, B block size.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.codes.triton_codes import INT8, NUMBERS, bytes_of, in_fp8, in_int8, kind_of, largest_of, scales_of
from engine.kernels.launch import Kernel
from engine.kernels.mla.absorbed import Latents


def write_latents(
    product: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    kept: Latents,
    *,
    norm: torch.Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    rank, size, latents, rotated = norm.shape[0], cos_sin.shape[1], kept.latents, kept.rotated
    factors, scales, scale_block, _ = scales_of(kept.codes)
    if not len(product):
        return
    _WRITE.launch(
        (len(product),), None,
        product, positions, cos_sin, slots, bytes_of(latents, kept.codes), rotated, factors, scales, norm, eps,
        product.stride(0), latents.stride(0), latents.stride(2), rotated.stride(0), rotated.stride(2), scale_block,
        C=rank, C_PADDED=triton.next_power_of_2(rank), HALF=size // 2, HALF_PADDED=triton.next_power_of_2(size // 2),
        B=rotated.shape[2], INTERLEAVED=interleaved, CODES=kind_of(kept.codes, product.device),
    )  # fmt: skip


def rotate_queries(
    q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, out: torch.Tensor, *, interleaved: bool
) -> None:
    size, num_heads = cos_sin.shape[1], q.shape[1]
    if not len(q):
        return
    _ROTATE.launch(
        (len(q),), None,
        q, positions, cos_sin, out, q.stride(0), q.stride(1), q.shape[2] - size, out.stride(0), out.stride(1),
        out.shape[2] - size,
        HQ=num_heads, HQ_PADDED=triton.next_power_of_2(num_heads), HALF=size // 2,
        HALF_PADDED=triton.next_power_of_2(size // 2), INTERLEAVED=interleaved,
    )  # fmt: skip


@triton.jit
def _write(
    product, positions_T, cos_sin_PR, slots_T, kv, rotated, factors_2, scales, norm_C, eps,
    product_row, kv_block, kv_slot, rotated_block, rotated_slot, scale_block,
    C: tl.constexpr, C_PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, B: tl.constexpr,
    INTERLEAVED: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_T + token).to(tl.int64)
    if slot >= 0:
        c, r = tl.arange(0, C_PADDED), tl.arange(0, HALF_PADDED)
        source, target = product + token * product_row, kv + slot // B * kv_block + slot % B * kv_slot
        x = tl.load(source + c, mask=c < C, other=0.0)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / C + eps)
        weight = tl.load(norm_C + c, mask=c < C, other=0.0)
        latents = (weight * (wide * scale).to(x.dtype)).to(x.dtype)
        if CODES == NUMBERS:
            kept = latents.to(kv.dtype.element_ty)
        elif CODES == INT8:
            largest = tl.max(largest_of(latents[None, :], (c < C)[None, :]), axis=0)
            tl.store(scales + slot // B * scale_block + slot % B, largest / 127.0)
            kept, _ = in_int8(latents, largest)
        else:
            kept, _ = in_fp8(latents, tl.load(factors_2), CODES)
        tl.store(target + c, kept, mask=c < C)
        inside = r < HALF
        cos, sin = cos_sin_at(positions_T + token, cos_sin_PR, r, inside, HALF)
        first_at, second_at = pair(r, HALF, INTERLEAVED)
        first = tl.load(source + C + first_at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + C + second_at, mask=inside, other=0.0).to(tl.float32)
        rotated_at = rotated + slot // B * rotated_block + slot % B * rotated_slot + r
        tl.store(rotated_at, (first * cos - second * sin).to(rotated.dtype.element_ty), mask=inside)
        tl.store(rotated_at + HALF, (second * cos + first * sin).to(rotated.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    q, positions_T, cos_sin_PR, out, q_token, q_head, q_first, out_token, out_head, out_first,
    HQ: tl.constexpr, HQ_PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, r = tl.arange(0, HQ_PADDED)[:, None], tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < HQ) & (r < HALF)
    cos, sin = cos_sin_at(positions_T + token, cos_sin_PR, r, r < HALF, HALF)
    first_at, second_at = pair(r, HALF, INTERLEAVED)
    source = q + token * q_token + head * q_head + q_first
    first = tl.load(source + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=inside, other=0.0).to(tl.float32)
    target = out + token * out_token + head * out_head + out_first + r
    tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)


@triton.jit
def cos_sin_at(position_at, cos_sin_PR, r, inside, HALF: tl.constexpr):
    row = cos_sin_PR + tl.load(position_at).to(tl.int64) * (2 * HALF)
    return tl.load(row + r, mask=inside, other=0.0), tl.load(row + HALF + r, mask=inside, other=0.0)


@triton.jit
def pair(r, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        first, second = 2 * r, 2 * r + 1
    else:
        first, second = r, r + HALF
    return first, second


_WRITE, _ROTATE = Kernel(_write), Kernel(_rotate)
