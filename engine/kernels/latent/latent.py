"""Latents of a token, its rotated key beside them, and the attention of queries that live among the latents.

T tokens, Hq query heads, C size of the latents, R size of the rotated part, B block size.
"""

from __future__ import annotations

import torch

from engine.kernels.attention import AttentionPlan, Scores
from engine.kernels.attention.reference import attend
from engine.kernels.norm import rms_norm
from engine.kernels.twin import twin


@twin("engine.kernels.latent.triton_write")
def write_latents(
    product: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    norm: torch.Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """Normalise the latents and rotate the key of `product` [T, C + R], and write both into `kv_layer`.

    `kv_layer` [num_blocks, 1, B, 1, C + R] is a strided view of the pool; `norm` [C]; `cos_sin` [positions, R] float32 holds
    cos | sin halves; `positions` [T] and `slots` [T] (negative: not written) are int32. `interleaved`: neighbours are a pair,
    and pairs are written as halves.
    """
    rank, block_size = norm.shape[0], kv_layer.shape[2]
    latents = rms_norm.reference(product[:, :rank], norm, eps)
    keys = _rotated(product[:, None, rank:], positions, cos_sin, interleaved)[:, 0]
    written = slots >= 0
    at = slots[written].long()
    row = torch.cat((latents, keys), dim=-1)[written]
    kv_layer[at // block_size, 0, at % block_size, 0] = row.to(kv_layer.dtype)


@twin("engine.kernels.latent.triton_write")
def rotate_queries(
    q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, out: torch.Tensor, *, interleaved: bool
) -> None:
    """Write the rotated last R features of `q` [T, Hq, ...] to the last R of `out` [T, Hq, C + R]."""
    size = cos_sin.shape[1]
    out[..., -size:] = _rotated(q[..., -size:], positions, cos_sin, interleaved)


@twin("engine.kernels.latent.triton_latent")
def latent_attention(
    q: torch.Tensor, kv_layer: torch.Tensor, plan: AttentionPlan, *, rank: int, scale: float
) -> torch.Tensor:
    """Return the weighted latents [T, Hq, C] for `q` [T, Hq, C + R]; `rank` is C.

    `kv_layer` [num_blocks, 1, B, 1, C + R] holds the new tokens' latents already. Sums are in float32.
    """
    both, out = kv_layer.expand(-1, 2, -1, -1, -1), torch.empty_like(q)
    prompts = None if plan.prefill is None else plan.prefill.batch
    for rows, batch in ((slice(plan.num_decode), plan.decode), (slice(plan.num_decode, None), prompts)):
        if batch is not None:
            out[rows] = attend(q[rows], both, batch, Scores(scale=scale))
    return out[..., :rank]


def _rotated(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Turn `x` [T, heads, R]; the results' pairs lie half of it apart."""
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
