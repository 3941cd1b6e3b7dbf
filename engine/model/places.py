"""The place of a layer's content among the parts of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.attention import KeptColumn
from engine.kernels.delta.plan import KeptState

Part = torch.Tensor | Sequence[KeptState] | Sequence[KeptColumn]
Content = torch.Tensor | KeptState  # one layer's


def kept_at(parts: Sequence[Part], places: Sequence[tuple[int, int]]) -> tuple[int | None, list[Content]]:
    """The block of a column with a layer's content, None if it is elsewhere, and the views of it."""
    column, views = None, list[Content]()
    for number, layer in places:
        part = parts[number]
        kept = part[:, layer] if isinstance(part, torch.Tensor) else part[layer]
        if isinstance(kept, KeptColumn):  # all of a layer's content is in one
            column, kept = kept.number, kept.kept
        views.append(kept)
    return column, views
