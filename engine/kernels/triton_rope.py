# ruff: noqa: SIM102 - Triton decides an outer `if` of constants at compile time, an `and` with one at run time
"""Triton version of `rope`: a program rotates one head of a few tokens, and writes keys and values.

T tokens, P partial sums, Hq query heads, Hkv key and value heads, D head size, B block size, ROWS tokens of a program.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device import describe
from engine.kernels.launch import Kernel


def rope_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    in_place: bool = False,
) -> torch.Tensor:
    block_size, num_kv_heads, head_dim = kv_layer.shape[2:]
    num_tokens, width = qkv.shape[-2:]
    num_heads = width // head_dim - 2 * num_kv_heads
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=kv_layer.dtype, device=qkv.device)
    rows = 1 if num_tokens <= 32 else 4 if num_tokens <= 128 else 16 if num_tokens <= 512 else 32
    pdl = describe(qkv.device).has_tma
    assert not in_place or qkv.dim() == 2, "partial sums have no place"
    parts = qkv.shape[0] if qkv.dim() == 3 else 1
    kv_block, kv_plane = kv_layer.stride()[:2]
    fixed = (
        parts, num_heads, num_kv_heads, block_size, rows, head_dim // 2, triton.next_power_of_2(head_dim // 2),
        q_norm is not None, k_norm is not None, in_place, pdl,
    )  # fmt: skip
    _ROPE.launch(
        (num_heads + 2 * num_kv_heads, triton.cdiv(num_tokens, rows)), (qkv.dtype, out.dtype, kv_block, kv_plane, *fixed),
        qkv, positions, cos_sin, slots, kv_layer, out, out if q_norm is None else q_norm, out if k_norm is None else k_norm,
        eps, num_tokens, kv_block, kv_plane, *fixed,
        num_warps=1 if rows == 1 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _rope(
    qkv_PTW, positions_T, cos_sin_PD, slots_T, kv, out_THD, q_norm_D, k_norm_D, eps, num_tokens, kv_block, kv_plane,
    PARTS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
    IN_PLACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = token < num_tokens
    token = token.to(tl.int64)
    d = tl.arange(0, HALF_PADDED)[None, :]
    inside = there[:, None] & (d < HALF)
    D: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (HQ + 2 * HKV) * D
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions_T + token, mask=there, other=0).to(tl.int64)
    slot = tl.load(slots_T + token, mask=there, other=-1).to(tl.int64)
    source = qkv_PTW + token[:, None] * WIDTH + head * D + d
    first, second = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        more = source + part * num_tokens.to(tl.int64) * WIDTH
        first += tl.load(more, mask=inside, other=0.0)
        second += tl.load(more + HALF, mask=inside, other=0.0)
    dtype = out_THD.dtype.element_ty
    first, second = first.to(dtype), second.to(dtype)
    if NORM_Q:
        if head < HQ:
            first, second = _normed(first, second, q_norm_D, d, eps, HALF)
    if NORM_K:
        if (head >= HQ) & (head < HQ + HKV):
            first, second = _normed(first, second, k_norm_D, d, eps, HALF)
    if head < HQ + HKV:
        cos = tl.load(cos_sin_PD + position[:, None] * D + d, mask=inside, other=0.0)
        sin = tl.load(cos_sin_PD + position[:, None] * D + HALF + d, mask=inside, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
    if head < HQ:
        target = out_THD + (token * HQ + head)[:, None] * D + d
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    else:
        if IN_PLACE:
            tl.store(source, first, mask=inside)
            tl.store(source + HALF, second, mask=inside)
        plane = (head >= HQ + HKV).to(tl.int64)
        kv_at = head - HQ - plane * HKV
        target = kv + (slot // B * kv_block + plane * kv_plane + (slot % B * HKV + kv_at) * D)[:, None] + d
        written = inside & (slot >= 0)[:, None]
        tl.store(target, first, mask=written)
        tl.store(target + HALF, second, mask=written)


@triton.jit
def _normed(first, second, weight_D, d, eps, HALF: tl.constexpr):
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
    weight_a = tl.load(weight_D + d, mask=d < HALF, other=0.0)
    weight_b = tl.load(weight_D + HALF + d, mask=d < HALF, other=0.0)
    return weight_a * (a * scale).to(first.dtype), weight_b * (b * scale).to(second.dtype)


_ROPE = Kernel(_rope)
