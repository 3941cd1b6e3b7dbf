"""Embeddings of placeholder tokens for images or sound, also without an image. T tokens, E hidden size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.batch.batch import ForwardBatch
from engine.kernels.norm import rms_norm
from engine.spec.halves import PlaceholderSpec
from engine.weights.parameters import Weights, whole
from engine.weights.stage import Store


class Placeholders:
    """Rows of placeholder tokens, computed once while loading. The kinds' token ids are contiguous."""

    def __init__(self, specs: Sequence[PlaceholderSpec], hidden: int, weights: Weights) -> None:
        self._first = specs[0].first
        self._table = weights.empty((sum(spec.count for spec in specs), hidden))
        for spec in specs:
            parameters = {
                "rows": whole(f"{spec.under}.embedding.weight", spec.stored_rows, spec.size),
                "norm": whole(f"{spec.under}.hard_embedding_norm.weight", spec.size),
                "projection": whole(f"{spec.under}.embedding_projection.weight", hidden, spec.size),
            }
            temporary = 4 * (3 * spec.count * (spec.size + hidden) + hidden * spec.size)
            weights.staged(parameters, self._store(spec), temporary=temporary)

    def _store(self, spec: PlaceholderSpec) -> Store:
        begin = spec.first - self._first
        target = self._table[begin : begin + spec.count]

        def store(loaded: Mapping[str, torch.Tensor]) -> None:
            normed = rms_norm.reference(loaded["rows"][: spec.count], loaded["norm"], spec.eps)
            target.copy_(rms_norm.reference(normed @ loaded["projection"].T, None, spec.eps))

        return store

    def instead(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return the embeddings [T, E] with the placeholders' rows."""
        at = batch.tokens.ids() - self._first
        return torch.where((at >= 0)[:, None], self._table[at.clamp(min=0)], x)
