"""Models whose sliding-window layers have separate blocks (columns), so that sequences hold less.

See docs/design/sliding-windows.md.
"""

from __future__ import annotations

from dataclasses import replace

from engine.cache.pages import DEFAULT_BLOCK_SIZE, column_places, page_parts
from engine.config import EngineConfig
from engine.spec.attention import AttentionSpec
from engine.spec.model import ModelSpec

LEAST_LENGTHS = 2  # windows in the longest sequence
MAX_COLUMN_WASTE = 0.25  # share by which a short sequence's blocks may exceed its bytes


def with_columns(model: ModelSpec, config: EngineConfig, dtype: str, longest: int) -> ModelSpec:
    """Return the model with layers that keep only the longest window, for sequences of at most `longest` tokens.

    It stays as it is where that would not pay, or where blocks are not enough: without layers that see everything, with
    states, or where layers with a window keep different things. Or where somebody wants it to.
    """
    window = max((abs(window) for window in model.windows), default=0)
    if (
        config.disable_hybrid_kv_cache_manager
        or not window
        or LEAST_LENGTHS * window > longest
        or model.has_state
        or not _are_alike(model)
    ):
        return model
    layers = [
        layer.with_attention(keeps=window) if layer.kept and layer.attention and layer.attention.window else layer
        for layer in model.layers
    ]
    changed = replace(model, layers=tuple(layers))
    return changed if _fits(changed, config.block_size or DEFAULT_BLOCK_SIZE, dtype) else model


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


def _fits(model: ModelSpec, block_size: int, dtype: str) -> bool:
    parts = page_parts(model, dtype)
    tokens, windowed = [part for part in parts if not part.window], [part for part in parts if part.window]
    block_bytes = sum(part.block_bytes(block_size) for part in tokens)
    places = column_places(windowed, block_bytes, block_size)
    if not places:
        return False
    held = block_bytes * (1 + places[-1][0] + 1)
    needed = block_bytes + sum(part.block_bytes(block_size) for part in windowed)
    return held <= (1 + MAX_COLUMN_WASTE) * needed
