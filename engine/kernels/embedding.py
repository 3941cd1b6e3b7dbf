"""The first step of a pass: token ids -> rows of the embedding. T tokens, V vocabulary, E features."""

from __future__ import annotations

import torch

from engine.kernels.device import twin


@twin("engine.kernels.triton_embedding")
def embed(token_ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return rows [T, E] of `table` [V, E] for `token_ids` [T] int32.

    Where `sources` [T] int32 is not negative, the token is `newest[source]` (int64): the host does not know it yet.
    """
    return torch.nn.functional.embedding(ids_of(token_ids, sources, newest), table)


def ids_of(token_ids: torch.Tensor, sources: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """Return the tokens [T] int64 from either source."""
    return torch.where(sources >= 0, newest[sources.clamp(min=0).long()], token_ids.long())
