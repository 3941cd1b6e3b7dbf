"""The attention of a model's passes on a device: kernels' forms, tiles and items by shape of heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.kernels.attention import HeadShape, item_queries, items_at_once, tiling
from engine.kernels.device import describe
from engine.kernels.mla import Forms, forms_on, mla_items_at_once
from engine.spec.mla import MLASpec
from engine.spec.model import ModelSpec
from engine.step.limits import HeadLimits
from engine.weights.parameters import Weights


def head_limits(
    model: ModelSpec, windows: Mapping[HeadShape, tuple[int, ...]], weights: Weights, *, verifies: bool
) -> dict[HeadShape, HeadLimits]:
    """The limits of each shape of heads with these windows. `verifies`: passes have drafted tokens."""

    def of(heads: HeadShape) -> HeadLimits:
        forms = _forms(model, heads, weights.dtype, weights.device)
        device = describe(weights.device)
        return HeadLimits(
            heads,
            windows[heads],
            items_at_once=items_at_once(device, heads.num_kv_heads)
            if forms is None
            else mla_items_at_once(device, heads.num_heads),
            item_queries=item_queries(heads) if forms is None and verifies else 1,
            tiling=tiling(weights.device, weights.dtype, heads, is_plain=model.has_plain_attention(heads)),
            forms=forms,
        )

    return {heads: of(heads) for heads in windows}


def _forms(model: ModelSpec, heads: HeadShape, dtype: torch.dtype, device: torch.device) -> Forms | None:
    """Return the MLA forms of the layers with heads of this shape."""
    mixers = (mixer for mixer in model.attentions if mixer.heads == heads)
    found = (mixer.shape(dtype.itemsize) for mixer in mixers if isinstance(mixer, MLASpec))
    return next((forms_on(device, shape) for shape in found), None)
