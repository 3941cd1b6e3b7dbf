"""Sparse MLA: absorbed queries attend to the selected positions' latents.

T tokens, Hq query heads, C size of the latents, R size of the rotated part, B block size, K positions at most.
"""

from __future__ import annotations

import torch

from engine.kernels.attention import AttentionPlan
from engine.kernels.codes import decoded
from engine.kernels.device import twin
from engine.kernels.mla import Latents
from engine.kernels.sparse.selection import sequences_of

ELEMENTS_AT_ONCE = 1 << 22  # elements of latents copied at once, on a CPU


@twin("engine.kernels.sparse.triton_attention")
def sparse_attention(
    q: torch.Tensor, kept: Latents, plan: AttentionPlan, selected: torch.Tensor, *, rank: int, scale: float
) -> torch.Tensor:
    """Return the weighted latents [T, Hq, C] for `q` [T, Hq, C + R]; `rank` is C.

    `selected` [T, K] int32 is what `selected_positions` returned. Sums are in float32.
    """
    out = q.new_empty((*q.shape[:2], rank))
    step = max(1, ELEMENTS_AT_ONCE // (selected.shape[1] * q.shape[2]))
    for rows, table, _ in sequences_of(plan):
        for first in range(rows.start, rows.stop, step):
            some = slice(first, min(first + step, rows.stop))
            at = selected[some, : int((selected[some] >= 0).sum(dim=1).max())]
            found = _gathered(kept, table, at.clamp(min=0)).float()
            scores = torch.matmul(q[some].float(), found.transpose(1, 2)) * scale  # [rows, Hq, K]
            weights = scores.masked_fill(at[:, None] < 0, float("-inf")).softmax(dim=-1)
            out[some] = torch.matmul(weights, found[..., :rank]).to(q.dtype)
    return out


def _gathered(kept: Latents, table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Latents and rotated keys [rows, K, C + R] of one sequence's positions `at` [rows, K]."""
    block_size = kept.rotated.shape[2]
    place = (table[at // block_size].long(), 0, at % block_size, 0)
    latents = kept.latents[place]
    if kept.codes is not None:
        scales = None if kept.codes.scales is None else kept.codes.scales[place]
        latents = decoded(latents, scales, kept.codes.factors[0], kept.codes.dtype)
    return torch.cat((latents, kept.rotated[place]), dim=-1)
