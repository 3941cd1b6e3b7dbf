"""The first step of a pass: token ids -> rows of the embedding. T tokens, V vocabulary, E features."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.device import twin


@dataclass(frozen=True, slots=True)
class InputTokens:
    """The tokens of a pass. The host does not know yet those that the pass before samples."""

    known: torch.Tensor  # [T] int32
    sources: torch.Tensor  # [T] int32: row of `newest` with the token; -1: see `known`
    newest: torch.Tensor  # [R] int64

    @classmethod
    def known_alone(cls, ids: torch.Tensor, newest: torch.Tensor) -> InputTokens:
        """Tokens [T] none of which the pass before samples: `newest` [R] int64 is not read."""
        known = ids.int()
        return cls(known, torch.full_like(known, -1), newest)

    def ids(self) -> torch.Tensor:
        """Return the tokens [T] int64 from either source."""
        return torch.where(self.sources >= 0, self.newest[self.sources.clamp(min=0).long()], self.known.long())


@twin("engine.kernels.triton_embedding")
def embed(table: torch.Tensor, tokens: InputTokens) -> torch.Tensor:
    """Return rows [T, E] of `table` [V, E]."""
    return torch.nn.functional.embedding(tokens.ids(), table)
