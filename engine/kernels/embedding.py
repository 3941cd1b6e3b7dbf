"""The first step of a pass: token ids -> rows of the embedding. T tokens, V vocabulary, E features."""

from __future__ import annotations

import torch

from engine.kernels.backend import use_triton


def embed(token_ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return rows [T, E] of `table` [V, E] for `token_ids` [T] int32.

    Where `sources` [T] int32 is not negative the token is `newest[source]` (int64): one that the pass before sampled and that the
    host does not know yet.
    """
    if use_triton(table):
        from engine.kernels.triton_embedding import embed as kernel

        return kernel(token_ids, sources, newest, table)
    return reference(token_ids, sources, newest, table)


def reference(
    token_ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """The twin of `embed`."""
    ids = torch.where(sources >= 0, newest[sources.clamp(min=0).long()], token_ids.long())
    return torch.nn.functional.embedding(ids, table)
