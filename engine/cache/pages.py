"""The memory behind the block ids: what a block keeps, how many fit, and the pool's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from common.pages import LANE_BYTES, KVLayout, PagePart
from engine.config import EngineConfig
from engine.model.spec import ModelSpec

DEFAULT_CPU_BYTES = 256 << 20
DEFAULT_BLOCK_SIZE = 16  # token positions
# With states: a larger block keeps fewer of them, and is found again by longer prefixes alone.
MAX_BLOCK_SIZE = 1024
MAX_STATE_SHARE = 0.8  # a block's bytes that are state
GPU_HEADROOM = 0.06  # share of the memory for graphs, library workspaces and fragments


def page_parts(model: ModelSpec, dtype: str) -> list[PagePart]:
    """Return the parts of a block: one for each kind of content that layers keep."""
    return [
        PagePart(
            layers=layers,
            planes=kept.planes,
            heads=kept.heads,
            dim=kept.dim,
            dtype=kept.dtype or dtype,
            per_token=kept.per_token,
        )
        for kept, layers in model.kept.items()
    ]


def plan_layout(model: ModelSpec, config: EngineConfig, dtype: str) -> KVLayout:
    """Return the pool's layout: `config.num_blocks` blocks, or as many as fit into `config.kv_memory_bytes`.

    With neither, on a GPU: as many as fit into what weights and a pass leave. Raises ValueError when no block fits.
    """
    memory = config.kv_memory_bytes
    if memory is None and config.num_blocks is None:
        memory = DEFAULT_CPU_BYTES if config.device == "cpu" else _free_bytes(model, config)
    return layout_of(page_parts(model, dtype), config, memory or 0)


def layout_of(parts: Sequence[PagePart], config: EngineConfig, memory: int) -> KVLayout:
    """Return a layout of `config.num_blocks` blocks with these parts, or of as many as fit into `memory` bytes.

    Raises ValueError when no block fits.
    """
    size = config.block_size or block_size(parts)
    block_bytes = sum(part.block_bytes(size) for part in parts)
    num_blocks = config.num_blocks or memory // block_bytes
    if num_blocks <= 0:
        raise ValueError(f"{memory} bytes of memory for KV are less than one block of {block_bytes} bytes")
    return KVLayout.of(parts, num_blocks=num_blocks, block_size=size)


def block_size(parts: Sequence[PagePart]) -> int:
    """Return 16, or more for parts with states: up to 1,024, until a block is not mostly state."""
    state = sum(part.block_bytes(1) for part in parts if not part.per_token)
    token = sum(part.block_bytes(1) for part in parts if part.per_token)
    size = DEFAULT_BLOCK_SIZE
    while size < MAX_BLOCK_SIZE and state > MAX_STATE_SHARE * (state + size * token):
        size *= 2
    return size


def _free_bytes(model: ModelSpec, config: EngineConfig) -> int:
    free, total = torch.cuda.mem_get_info(config.device)
    # The widest moment of a pass: the MLP's input, its two halves and their product; and the logits, twice, in float32.
    token_bytes = 2 * (4 * model.hidden_size + 3 * model.widest_mlp)
    logits_bytes = 8 * model.vocab_size * min(config.max_sequences, config.max_batch_tokens)
    return free - config.max_batch_tokens * token_bytes - logits_bytes - int(GPU_HEADROOM * total)


def pool_shape(layout: KVLayout) -> tuple[int, ...]:
    """Return `[num_blocks, layers, planes, slots, heads, dim]` for one part, `[num_blocks, bytes]` for several.

    Raises ValueError unless a block is a whole number of 32-bit lanes, the unit of digests and copies.
    """
    for part in layout.pages:
        if part.block_bytes(layout.block_size) % LANE_BYTES:
            raise ValueError(f"a part of {part.block_bytes(layout.block_size)} bytes is no multiple of {LANE_BYTES}")
    if len(layout.pages) > 1:
        return (layout.num_blocks, layout.block_bytes)
    (part,) = layout.pages
    return (layout.num_blocks, *_part_shape(part, layout.block_size))


def pool_dtype(layout: KVLayout) -> torch.dtype:
    """Return the part's dtype, bytes for several parts."""
    return torch_dtype(layout.pages[0].dtype) if len(layout.pages) == 1 else torch.uint8


def part_views(pool: torch.Tensor, layout: KVLayout) -> list[torch.Tensor]:
    """View the pool as one tensor for each part, [num_blocks, layers, planes, slots, heads, dim] in the part's dtype."""
    if len(layout.pages) == 1:
        return [pool]
    views, start = [], 0
    for part in layout.pages:
        size = part.block_bytes(layout.block_size)
        own = pool[:, start : start + size].view(torch_dtype(part.dtype))
        views.append(own.unflatten(1, _part_shape(part, layout.block_size)))
        start += size
    return views


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a page part's name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return memory that no peer can reach: for a process of its own."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Such zeros take memory only once they are written: blocks that nobody needs cost nothing.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def _part_shape(part: PagePart, block_size: int) -> tuple[int, ...]:
    return (part.layers, part.planes, part.slots(block_size), part.heads, part.dim)
