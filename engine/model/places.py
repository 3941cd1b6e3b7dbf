"""The place of a layer's content among the parts of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.attention import KeptWindow
from engine.kernels.delta.plan import KeptState

Part = torch.Tensor | Sequence[KeptState] | Sequence[KeptWindow]
Content = torch.Tensor | KeptState  # one layer's


def kept_at(parts: Sequence[Part], places: Sequence[tuple[int, int]]) -> tuple[int | None, list[Content]]:
    """The block of a window's entry that has a layer's places in the pool, None if blocks of tokens do; and the views of them."""
    block, views = None, list[Content]()
    for number, layer in places:
        part = parts[number]
        kept = part[:, layer] if isinstance(part, torch.Tensor) else part[layer]
        if isinstance(kept, KeptWindow):  # all of a layer's content is in one
            block, kept = kept.number, kept.kept
        views.append(kept)
    return block, views
