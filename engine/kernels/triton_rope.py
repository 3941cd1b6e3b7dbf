# ruff: noqa: SIM102 - Triton decides an outer `if` of constants at compile time, an `and` with one at run time
"""Triton version of `rope`: a program rotates one head of a few tokens, and writes keys and values.

`_rope` is for heads that are rotated whole, in halves, `_rope_any` for all else.
T tokens, P partial sums, Hq query heads, Hkv key and value heads, D head size, R rotated dimensions, B block size, ROWS tokens
of a program.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.codes import Codes, head_dim
from engine.kernels.codes.triton_codes import (
    INT4,
    INT8,
    NUMBERS,
    bytes_of,
    ends_of,
    in_fp8,
    in_int4,
    in_int8,
    int4_scales,
    kind_of,
    largest_of,
    place_of,
    scales_of,
    turned,
)
from engine.kernels.device import describe
from engine.kernels.launch import Kernel
from engine.kernels.once import Once
from engine.kernels.rope import Heads


def rope_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    how: Heads,
    *,
    codes: Codes | None = None,
    in_place: bool = False,
    is_spare: bool = False,
    once: Once | None = None,
) -> torch.Tensor:
    block_size, num_kv_heads = kv_layer.shape[2:4]
    dim = head_dim(kv_layer, codes)
    num_tokens, width = qkv.shape[-2:]
    num_heads = (width // dim - 2 * num_kv_heads) // (2 if how.gated else 1)
    dtype = kv_layer.dtype if codes is None else codes.dtype
    out = torch.empty((num_tokens, num_heads, dim), dtype=dtype, device=qkv.device)
    rows = 1 if num_tokens <= 32 else 4 if num_tokens <= 128 else 16 if num_tokens <= 512 else 32
    pdl = describe(qkv.device).has_tma
    assert not in_place or qkv.dim() == 2, "partial sums have no place"
    parts = qkv.shape[0] if qkv.dim() == 3 else 1
    kv_block, kv_plane = kv_layer.stride()[:2]
    in_blocks = codes is not None and codes.kind == "int4" and dim & (dim - 1) != 0
    if in_blocks or not how.are_plain(cos_sin, dim):
        _launch_any(
            qkv, positions, cos_sin, slots, kv_layer, out, how, codes,
            parts=parts, rows=rows, in_place=in_place, pdl=pdl,
        )  # fmt: skip
        return out
    q_norm, k_norm = how.q_norm, how.k_norm
    factors, scales, scale_block, scale_plane = scales_of(codes)
    fixed = (
        parts, num_heads, num_kv_heads, block_size, rows, dim // 2, triton.next_power_of_2(dim // 2),
        q_norm is not None, k_norm is not None, in_place, kind_of(codes, qkv.device), pdl,
    )  # fmt: skip
    _ROPE.launch(
        (num_heads + 2 * num_kv_heads, triton.cdiv(num_tokens, rows)),
        (qkv.dtype, out.dtype, kv_block, kv_plane, scale_block, scale_plane, *fixed),
        qkv, positions, cos_sin, slots, bytes_of(kv_layer, codes), factors, scales, out,
        out if q_norm is None else q_norm, out if k_norm is None else k_norm,
        how.eps, num_tokens, kv_block, kv_plane, scale_block, scale_plane, *fixed,
        num_warps=1 if rows == 1 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["scales"])
def _rope(
    qkv_PTW, positions_T, cos_sin_PD, slots_T, kv, factors_2, scales, out_THD, q_norm_D, k_norm_D, eps, num_tokens,
    kv_block, kv_plane, scale_block, scale_plane,
    PARTS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
    IN_PLACE: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
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
        if CODES == INT4:
            a, b = turned(first, ROWS, HALF, HALF), turned(second, ROWS, HALF, HALF)
            times: tl.constexpr = D**-0.5
            first, second = ((a + b) * times).to(dtype), ((a - b) * times).to(dtype)
    if head < HQ:
        rotated_at = out_THD + (token * HQ + head)[:, None] * D + d
        tl.store(rotated_at, first, mask=inside)
        tl.store(rotated_at + HALF, second, mask=inside)
    else:
        plane = (head >= HQ + HKV).to(tl.int64)
        kv_at = head - HQ - plane * HKV
        kept, kept_too, kept_at, kept_inside = first, second, d, inside
        if CODES != NUMBERS:
            if CODES == INT4:
                smallest, largest = ends_of(first, inside)
                least, most = ends_of(second, inside)
                broken = (smallest + least) * 0.0  # NaN if one is
                both = int4_scales(tl.minimum(smallest, least) + broken, tl.maximum(largest, most) + broken)
                scale_at = scales + slot // B * scale_block + plane * scale_plane + slot % B * HKV + kv_at
                tl.store(scale_at, both, mask=there & (slot >= 0))
                kept, first = in_int4(first, both, ROWS, HALF_PADDED // 2)
                kept_too, second = in_int4(second, both, ROWS, HALF_PADDED // 2)
                kept_at = tl.arange(0, HALF_PADDED // 2)[None, :]
                kept_inside = there[:, None] & (kept_at < HALF // 2)
            elif CODES == INT8:
                half, other = largest_of(first, inside), largest_of(second, inside)
                largest = tl.maximum(half, other) + (half + other) * 0.0  # NaN if one is
                scale_at = scales + slot // B * scale_block + plane * scale_plane + slot % B * HKV + kv_at
                tl.store(scale_at, largest / 127.0, mask=there & (slot >= 0))
                kept, first = in_int8(first, largest[:, None])
                kept_too, second = in_int8(second, largest[:, None])
            else:
                factor = tl.load(factors_2 + plane)
                kept, first = in_fp8(first, factor, CODES)
                kept_too, second = in_fp8(second, factor, CODES)
        if IN_PLACE:
            tl.store(source, first, mask=inside)
            tl.store(source + HALF, second, mask=inside)
        row = slot // B * kv_block + plane * kv_plane + (slot % B * HKV + kv_at) * place_of(D, CODES)
        written = kept_inside & (slot >= 0)[:, None]
        tl.store(kv + row[:, None] + kept_at, kept, mask=written)
        tl.store(kv + row[:, None] + kept_at + place_of(HALF, CODES), kept_too, mask=written)


@triton.jit
def _normed(first, second, weight_D, d, eps, HALF: tl.constexpr):
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
    weight_a = tl.load(weight_D + d, mask=d < HALF, other=0.0)
    weight_b = tl.load(weight_D + HALF + d, mask=d < HALF, other=0.0)
    return weight_a * (a * scale).to(first.dtype), weight_b * (b * scale).to(second.dtype)


def _launch_any(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    out: torch.Tensor,
    how: Heads,
    codes: Codes | None,
    *,
    parts: int,
    rows: int,
    in_place: bool,
    pdl: bool,
) -> None:
    num_tokens, num_heads, dim = out.shape
    block_size, num_kv_heads = kv_layer.shape[2:4]
    kv_block, kv_plane = kv_layer.stride()[:2]
    factors, scales, scale_block, scale_plane = scales_of(codes)
    norm = (
        UNIT if how.norms_without_weight else NONE if how.q_norm is None else PLUS_ONE if how.norm_plus_one else WEIGHT
    )
    fixed = (
        parts, num_heads, num_kv_heads, block_size, rows, dim, triton.next_power_of_2(dim),
        0 if cos_sin is None else cos_sin.shape[1], how.interleaved, norm, how.norm_after, how.norms_values,
        how.query_growth is not None, 2 if how.gated else 1, in_place, kind_of(codes, qkv.device), pdl,
    )  # fmt: skip
    _ROPE_ANY.launch(
        (num_heads + 2 * num_kv_heads, triton.cdiv(num_tokens, rows)),
        (qkv.dtype, out.dtype, kv_block, kv_plane, scale_block, scale_plane, *fixed),
        qkv, positions, cos_sin, slots, bytes_of(kv_layer, codes), factors, scales, out,
        how.q_norm, how.k_norm, how.query_growth,
        how.eps, num_tokens, kv_block, kv_plane, scale_block, scale_plane, *fixed,
        num_warps=1 if rows == 1 else 4, launch_pdl=pdl,
    )  # fmt: skip


NONE, WEIGHT, PLUS_ONE, UNIT = 0, 1, 2, 3  # norms of queries and keys


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["scales"])
def _rope_any(
    qkv_PTW, positions_T, cos_sin_PR, slots_T, kv, factors_2, scales, out_THD, q_norm_D, k_norm_D, growth_P, eps, num_tokens,
    kv_block, kv_plane, scale_block, scale_plane,
    PARTS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    NORM_AFTER: tl.constexpr, NORM_VALUES: tl.constexpr, GROWTH: tl.constexpr, STEP: tl.constexpr,
    IN_PLACE: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_rope` with whole heads: each dimension also loads the other one of its pair.

    STEP: heads from one query to the next.
    """
    head = tl.program_id(0)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = token < num_tokens
    token = token.to(tl.int64)
    d = tl.arange(0, D_PADDED)
    if INTERLEAVED:
        other, pair, is_first = d ^ 1, d // 2, d % 2 == 0
    else:
        is_first = d < R // 2
        other, pair = tl.where(is_first, d + R // 2, d - R // 2), tl.where(is_first, d, d - R // 2)
    turns = d < R
    other, pair = tl.where(turns, other, d), tl.where(turns, pair, 0)
    inside = there[:, None] & (d < D)[None, :]
    WIDTH: tl.constexpr = (HQ * STEP + 2 * HKV) * D
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions_T + token, mask=there, other=0).to(tl.int64)
    slot = tl.load(slots_T + token, mask=there, other=-1).to(tl.int64)
    row = qkv_PTW + token[:, None] * WIDTH + (head + tl.minimum(head, HQ) * (STEP - 1)) * D
    x = tl.load(row + d[None, :], mask=inside, other=0.0)
    y = tl.load(row + other[None, :], mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        more = row + part * num_tokens.to(tl.int64) * WIDTH
        x += tl.load(more + d[None, :], mask=inside, other=0.0)
        y += tl.load(more + other[None, :], mask=inside, other=0.0)
    dtype = out_THD.dtype.element_ty
    x, y = x.to(dtype), y.to(dtype)
    if head < HQ + HKV:
        weight_x, weight_y = tl.full((1, D_PADDED), 1.0, tl.float32), tl.full((1, D_PADDED), 1.0, tl.float32)
        if (NORM == 1) | (NORM == 2):
            if head < HQ:
                weight_x = tl.load(q_norm_D + d, mask=d < D, other=0.0)[None, :].to(tl.float32)
                weight_y = tl.load(q_norm_D + other, mask=d < D, other=0.0)[None, :].to(tl.float32)
            else:
                weight_x = tl.load(k_norm_D + d, mask=d < D, other=0.0)[None, :].to(tl.float32)
                weight_y = tl.load(k_norm_D + other, mask=d < D, other=0.0)[None, :].to(tl.float32)
            if NORM == 2:
                weight_x, weight_y = weight_x + 1.0, weight_y + 1.0
        if NORM > 0:
            if not NORM_AFTER:
                x, y = _normed_whole(x, x, weight_x, eps, D), _normed_whole(y, x, weight_y, eps, D)
        if R > 0:
            at = cos_sin_PR + position[:, None] * R + pair[None, :]
            cos = tl.load(at, mask=inside & turns[None, :], other=1.0)
            sin = tl.load(at + R // 2, mask=inside & turns[None, :], other=0.0)
            sin = tl.where(is_first[None, :], -sin, sin)
            x = (x.to(tl.float32) * cos + y.to(tl.float32) * sin).to(dtype)
        if NORM > 0:
            if NORM_AFTER:
                x = _normed_whole(x, x, weight_x, eps, D)
    else:
        if NORM_VALUES:
            x = _normed_whole(x, x, tl.full((1, 1), 1.0, tl.float32), eps, D)
    if GROWTH:
        if head < HQ:
            growth = tl.load(growth_P + position, mask=there, other=0.0)[:, None]
            x = (x.to(tl.float32) * growth).to(dtype)
    if CODES == INT4:
        if head < HQ + HKV:
            TURNED: tl.constexpr = D & -D
            times: tl.constexpr = TURNED**-0.5
            x = (turned(x, ROWS, D_PADDED, TURNED) * times).to(dtype)
    if head < HQ:
        tl.store(out_THD + (token * HQ + head)[:, None] * D + d[None, :], x, mask=inside)
    else:
        plane = (head >= HQ + HKV).to(tl.int64)
        kv_at = head - HQ - plane * HKV
        kept, kept_at, kept_inside = x, d[None, :], inside
        if CODES != NUMBERS:
            if CODES == INT4:
                smallest, largest = ends_of(x, inside)
                both = int4_scales(smallest, largest)
                scale_at = scales + slot // B * scale_block + plane * scale_plane + slot % B * HKV + kv_at
                tl.store(scale_at, both, mask=there & (slot >= 0))
                kept, x = in_int4(x, both, ROWS, D_PADDED // 2)
                kept_at = tl.arange(0, D_PADDED // 2)[None, :]
                kept_inside = there[:, None] & (kept_at < D // 2)
            elif CODES == INT8:
                largest = largest_of(x, inside)
                scale_at = scales + slot // B * scale_block + plane * scale_plane + slot % B * HKV + kv_at
                tl.store(scale_at, largest / 127.0, mask=there & (slot >= 0))
                kept, x = in_int8(x, largest[:, None])
            else:
                kept, x = in_fp8(x, tl.load(factors_2 + plane), CODES)
        if IN_PLACE:
            tl.debug_barrier()  # all threads have loaded their pairs
            tl.store(row + d[None, :], x, mask=inside)
        target = slot // B * kv_block + plane * kv_plane + (slot % B * HKV + kv_at) * place_of(D, CODES)
        tl.store(kv + target[:, None] + kept_at, kept, mask=kept_inside & (slot >= 0)[:, None])


@triton.jit
def _normed_whole(x, head, weight, eps, D: tl.constexpr):
    """x, part or all of a head [ROWS, D_PADDED], divided by the head's RMS and weighted."""
    wide = head.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
    return (x.to(tl.float32) * scale * weight).to(x.dtype)


_ROPE, _ROPE_ANY = Kernel(_rope), Kernel(_rope_any)
