"""Attention of whole texts, one behind the other: one launch, whatever their lengths.

T queries, S keys, Hq query heads, Hkv key and value heads, D head size, R distances on each side with a bias of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.device import twin


@dataclass(frozen=True, slots=True)
class Distances:
    """Biases of scores by how far a key is behind its query; those farther than R are as R."""

    biases: torch.Tensor  # [Hq, 2 R + 1] float32, from -R on
    places: torch.Tensor  # [T] int32: each query's own key

    def at(self, num_keys: int) -> torch.Tensor:
        """Return [Hq, T, S] float32."""
        most = self.biases.shape[1] // 2
        behind = torch.arange(num_keys, device=self.places.device) - self.places[:, None]
        return self.biases[:, behind.clamp(-most, most) + most]


@twin("engine.kernels.texts.triton_attention")
def attend_texts(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    distances: Distances | None = None,
) -> torch.Tensor:
    """Return [T, Hq, D] for `queries` [T, Hq, D], `keys` and `values` [S, Hkv, D], whose rows may lie apart.

    `seen` [2, T] int32: the first key that a query meets, and the one behind its last: at least one.
    """
    at = torch.arange(len(keys), device=keys.device)
    is_seen = (at >= seen[0, :, None]) & (at < seen[1, :, None])
    mask = torch.zeros(is_seen.shape, device=keys.device).masked_fill(~is_seen, float("-inf"))
    if distances is not None:
        mask = mask + distances.at(len(keys))
    own, its_keys, its_values = (one.transpose(0, 1)[None] for one in (queries, keys, values))
    found = scaled_dot_product_attention(
        own,
        its_keys,
        its_values,
        attn_mask=mask.to(queries.dtype),
        enable_gqa=keys.shape[1] < queries.shape[1],
        scale=scale,
    )
    return found[0].transpose(0, 1)
