"""Triton version of `rope`: one program a (token, head) rotates it and, for keys and values, writes it into the pool.

T tokens, Hq query heads, Hkv key and value heads, D head size, B block size.
"""

import torch
import triton
import triton.language as tl


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    _rope[(num_tokens, num_heads + 2 * num_kv_heads)](
        q, k, v, positions, cos_sin, slots, kv_layer, out,
        q if q_norm is None else q_norm, k if k_norm is None else k_norm, eps,
        num_heads, num_kv_heads, kv_layer.shape[2],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), kv_layer.stride(3),
        HALF=head_dim // 2, HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        NORM_Q=q_norm is not None, NORM_K=k_norm is not None,
    )  # fmt: skip
    return out


@triton.jit
def _rope(
    q_THD, k_THD, v_THD, positions_T, cos_sin_PD, slots_T, kv, out_THD, q_norm_D, k_norm_D, eps,
    num_heads, num_kv_heads, block_size,
    q_token, q_head, k_token, k_head, v_token, v_head, kv_block, kv_plane, kv_slot, kv_head,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, HALF_PADDED)
    inside = at < HALF
    slot = tl.load(slots_T + token)
    home = kv + slot // block_size * kv_block + slot % block_size * kv_slot
    if head >= num_heads + num_kv_heads:
        kv_at = head - num_heads - num_kv_heads
        source = v_THD + token * v_token + kv_at * v_head
        target = home + kv_plane + kv_at * kv_head
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
        tl.store(target + HALF + at, tl.load(source + HALF + at, mask=inside), mask=inside)
    else:
        position = tl.load(positions_T + token)
        cos = tl.load(cos_sin_PD + position * 2 * HALF + at, mask=inside, other=0.0)
        sin = tl.load(cos_sin_PD + position * 2 * HALF + HALF + at, mask=inside, other=0.0)
        if head < num_heads:
            source = q_THD + token * q_token + head * q_head
            first = tl.load(source + at, mask=inside, other=0.0)
            second = tl.load(source + HALF + at, mask=inside, other=0.0)
            if NORM_Q:
                first, second = _normed(first, second, q_norm_D, at, inside, eps, HALF)
            target = out_THD + (token * num_heads + head) * 2 * HALF
        else:
            kv_at = head - num_heads
            source = k_THD + token * k_token + kv_at * k_head
            first = tl.load(source + at, mask=inside, other=0.0)
            second = tl.load(source + HALF + at, mask=inside, other=0.0)
            if NORM_K:
                first, second = _normed(first, second, k_norm_D, at, inside, eps, HALF)
            target = home + kv_at * kv_head
        first, second = first.to(tl.float32), second.to(tl.float32)
        tl.store(target + at, (first * cos - second * sin).to(target.dtype.element_ty), mask=inside)
        tl.store(target + HALF + at, (second * cos + first * sin).to(target.dtype.element_ty), mask=inside)


@triton.jit
def _normed(first, second, weight_D, at, inside, eps, HALF: tl.constexpr):
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / (2 * HALF) + eps)
    weight_a = tl.load(weight_D + at, mask=inside, other=0.0)
    weight_b = tl.load(weight_D + HALF + at, mask=inside, other=0.0)
    return weight_a * (a * scale).to(first.dtype), weight_b * (b * scale).to(second.dtype)
