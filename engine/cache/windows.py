"""Models whose sliding-window layers are a KV group of their own, where a sequence then holds less.

See docs/design/sliding-windows.md.
"""

from __future__ import annotations

from dataclasses import replace

from common.pages import PagePart, entry_places
from engine.cache.pages import block_size, page_parts
from engine.config import CacheConfig
from engine.groups import Window
from engine.spec.attention import AttentionSpec
from engine.spec.model import ModelSpec

LEAST_LENGTHS = 2  # windows in the longest sequence
MAX_ENTRY_WASTE = 0.25  # share of a short sequence's bytes that its blocks have more


def with_windows(model: ModelSpec, cache: CacheConfig, dtype: str, longest: int) -> ModelSpec:
    """Return the model with layers that keep no more than the longest window, for sequences of at most `longest` tokens.

    It stays as it is where that would not pay, or where blocks are not enough: without layers that see everything, or where
    layers with a window keep different things. Or where somebody wants it to.
    """
    window = max((abs(window) for window in model.windows), default=0)
    if cache.disable_hybrid_kv_cache_manager or not window or LEAST_LENGTHS * window > longest or not _are_alike(model):
        return model
    layers = [
        layer.with_attention(keeps=window) if layer.kept and layer.attention and layer.attention.window else layer
        for layer in model.layers
    ]
    changed = replace(model, layers=tuple(layers))
    return changed if _fits(page_parts(changed, dtype), cache.block_size, longest) else model


def _are_alike(model: ModelSpec) -> bool:
    """True if one shape of blocks suits all sliding-window layers, including those that lend their KV."""
    kept = {layer.kept for layer in model.layers if layer.kept and layer.attention and layer.attention.window}
    grouped = [mixer for mixer in model.attentions if isinstance(mixer, AttentionSpec)]
    lent = {mixer.sharing.lends: bool(mixer.window) for mixer in grouped if mixer.sharing.lends}
    borrowers = [mixer for mixer in grouped if mixer.sharing.borrows]
    return (
        len(kept) == 1
        and len(grouped) == len(model.attentions)
        and all(lent[mixer.sharing.borrows] == bool(mixer.window) for mixer in borrowers)
    )


def _fits(parts: list[PagePart], asked: int | None, longest: int) -> bool:
    """True if entries hold a short sequence with little waste, and a long one holds fewer than all."""
    tokens = [part for part in parts if part.per_token and not part.window]
    windowed = [part for part in parts if part.window]
    if not tokens:
        return False
    size = asked or block_size([parts])
    block_bytes = sum(part.block_bytes(size) for part in tokens)
    places = entry_places(windowed, block_bytes, size)
    if not places or Window(block_size=size, window=windowed[0].window).most * size > longest:
        return False
    held = block_bytes * (1 + places[-1][-1][0] + 1)
    needed = block_bytes + sum(part.block_bytes(size) for part in windowed)
    return held <= (1 + MAX_ENTRY_WASTE) * needed
