"""The absorbed form of MLA: the cached latents and rotated keys, and attention of queries projected into the latent space.

T tokens, Hq query heads, C size of the latents, R size of the rotated part, B block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.kernels.attention import AttentionBatch, AttentionPlan, Scores
from engine.kernels.attention.reference import attend
from engine.kernels.codes import Codes, decoded, encoded
from engine.kernels.device import twin
from engine.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class Latents:
    """A layer's part of the pool, as strided views."""

    latents: torch.Tensor  # [num_blocks, 1, B, 1, C], or codes of them
    rotated: torch.Tensor  # [num_blocks, 1, B, 1, R]
    # The factor of latents is that of keys; scales are [num_blocks, 1, B, 1, 1].
    codes: Codes | None = None


def opened(kept: Sequence[torch.Tensor], rank: int, factors: torch.Tensor | None, dtype: torch.dtype) -> Latents:
    """Return a layer's content; `factors` None: unquantised, latents and rotated key in one row."""
    if factors is None:
        (both,) = kept
        return Latents(both[..., :rank], both[..., rank:])
    pages, rotated, *scales = kept
    return Latents(pages, rotated, Codes(dtype, factors, scales[0] if scales else None))


@twin("engine.kernels.mla.triton_write")
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
    """Normalise the latents and rotate the key of `product` [T, C + R], and write both into the pool.

    `norm` [C]; `cos_sin` [positions, R] float32 holds
    cos | sin halves; `positions` [T] and `slots` [T] (negative: not written) are int32. `interleaved`: neighbours are a pair,
    and pairs are written as halves.
    """
    rank, block_size = norm.shape[0], kept.rotated.shape[2]
    latents = rms_norm.reference(product[:, :rank], norm, eps)
    keys = rotate(product[:, None, rank:], positions, cos_sin, interleaved)[:, 0]
    written = slots >= 0
    at = slots[written].long()
    place = (at // block_size, 0, at % block_size, 0)
    kept.rotated[place] = keys[written].to(kept.rotated.dtype)
    if kept.codes is None:
        kept.latents[place] = latents[written].to(kept.latents.dtype)
        return
    kept.latents[place], scales = encoded(latents[written], 0, kept.codes)
    if kept.codes.scales is not None and scales is not None:
        kept.codes.scales[place] = scales


@twin("engine.kernels.mla.triton_write")
def rotate_queries(
    q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, out: torch.Tensor, *, interleaved: bool
) -> None:
    """Write the rotated last R features of `q` [T, Hq, ...] to the last R of `out` [T, Hq, C + R]."""
    size = cos_sin.shape[1]
    out[..., -size:] = rotate(q[..., -size:], positions, cos_sin, interleaved)


@twin("engine.kernels.mla.triton_absorbed")
def mla_attention(q: torch.Tensor, kept: Latents, plan: AttentionPlan, *, rank: int, scale: float) -> torch.Tensor:
    """Return the weighted latents [T, Hq, C] for `q` [T, Hq, C + R]; `rank` is C.

    `kept` holds the new tokens' latents already. Sums are in float32.
    """
    out = torch.empty_like(q)
    prompts = None if plan.prefill is None else plan.prefill.batch
    for rows, batch in ((slice(plan.num_decode), plan.decode), (slice(plan.num_decode, None), prompts)):
        if batch is not None:
            out[rows] = attend(q[rows], *_gathered(kept, batch), Scores(scale=scale))
    return out[..., :rank]


def _gathered(kept: Latents, batch: AttentionBatch) -> tuple[torch.Tensor, AttentionBatch]:
    """The blocks read by a batch, as keys and values [blocks, 2, B, 1, C + R], and the batch with renumbered blocks."""
    table = batch.block_table[:, : -(-batch.max_context_len // kept.rotated.shape[2])]
    blocks, numbers = torch.unique(table, return_inverse=True)
    latents, rotated = kept.latents[blocks.long()], kept.rotated[blocks.long()]
    if kept.codes is not None:
        scales = None if kept.codes.scales is None else kept.codes.scales[blocks.long()]
        latents = decoded(latents, scales, kept.codes.factors[0], kept.codes.dtype)
    both = torch.cat((latents, rotated), dim=-1)
    return both.expand(-1, 2, -1, -1, -1), replace(batch, block_table=numbers.int())


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate `x` [T, heads, R]; the pairs of the result are R / 2 apart."""
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
