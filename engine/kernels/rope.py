"""Rotary position embedding (rotate-half form), optional QK-norm, and the write into the pool, in one pass.

T tokens, Hq query heads, Hkv key and value heads, D head size, B block size.
"""

from __future__ import annotations

import torch

from engine.kernels import norm
from engine.kernels.backend import use_triton


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
    """Return the rotated `q` [T, Hq, D]; write the rotated `k` and `v` [T, Hkv, D] into `kv_layer`.

    `positions` [T] and `slots` [T] (block * B + offset) are int64; `cos_sin` [positions, D] float32 holds cos | sin halves;
    `kv_layer` [num_blocks, 2, B, Hkv, D] is a strided view of the pool. `q_norm` and `k_norm` [D]: RMSNorm of each head first.
    """
    if use_triton(q):
        from engine.kernels.triton_rope import rope_and_write_kv as kernel

        return kernel(q, k, v, positions, cos_sin, slots, kv_layer, q_norm=q_norm, k_norm=k_norm, eps=eps)
    return reference(q, k, v, positions, cos_sin, slots, kv_layer, q_norm=q_norm, k_norm=k_norm, eps=eps)


def reference(
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
    """The twin of `rope_and_write_kv`."""
    if q_norm is not None:
        q = norm.reference(q, q_norm, eps)
    if k_norm is not None:
        k = norm.reference(k, k_norm, eps)
    cos, sin = cos_sin[positions].chunk(2, dim=-1)  # [T, D / 2]
    block_size = kv_layer.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    kv_layer[blocks, 0, offsets] = _rotate(k, cos, sin).to(kv_layer.dtype)
    kv_layer[blocks, 1, offsets] = v.to(kv_layer.dtype)
    return _rotate(q, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
