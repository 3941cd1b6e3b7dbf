"""Rotary position embedding (rotate-half form), optional QK-norm, and the write into the pool, in one kernel.

T tokens, P partial sums, Hq query heads, Hkv key and value heads, D head size, B block size.
"""

from __future__ import annotations

import torch

from engine.kernels.norm import rms_norm
from engine.kernels.twin import twin


@twin("engine.kernels.triton_rope")
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
    """Return the rotated queries [T, Hq, D]; write the rotated keys, and the values, into `kv_layer`.

    `qkv` [T, (Hq + 2 Hkv) D], or partial sums of it [P, T, ...] in float32: queries, keys, values side by side. `positions`
    [T] and `slots` [T] (block * B + offset; negative: not written) are int32; `cos_sin` [positions, D] float32 holds
    cos | sin halves; `kv_layer` [num_blocks, 2, B, Hkv, D] is a strided view of the pool, and the result has its dtype.
    `q_norm` and `k_norm` [D]: RMSNorm of each head first. `in_place`: the rotated keys replace those in `qkv` too.
    """
    block_size, num_kv_heads, head_dim = kv_layer.shape[2:]
    if qkv.dim() == 3:
        qkv = qkv.sum(dim=0)
    heads = qkv.to(kv_layer.dtype).unflatten(-1, (-1, head_dim))  # [T, Hq + 2 Hkv, D]
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = rms_norm.reference(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm.reference(k, k_norm, eps)
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)  # [T, D / 2]
    written = slots >= 0 if bool((slots < 0).any()) else slice(None)
    slots = slots[written].long()
    blocks, offsets = slots // block_size, slots % block_size
    rotated = _rotate(k, cos, sin)
    if in_place:
        heads[:, q.shape[1] : -num_kv_heads] = rotated  # a view of `qkv`
    kv_layer[blocks, 0, offsets] = rotated[written]
    kv_layer[blocks, 1, offsets] = v[written]
    return _rotate(q, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
