"""The memory behind the block ids: how large, in which shape, and where it comes from by default."""

from __future__ import annotations

import torch
from msgspec import structs

from common.messages import KVLayout
from engine.config import EngineConfig
from engine.models.config import DecoderConfig


def plan_layout(decoder: DecoderConfig, config: EngineConfig, dtype: str) -> KVLayout:
    """Return the pool's layout: `config.num_blocks` blocks, or as many as fit into `config.kv_memory_bytes`.

    Raises ValueError when not a single block fits.
    """
    layout = KVLayout(
        num_blocks=config.num_blocks or 0,
        num_layers=decoder.num_layers,
        block_size=config.block_size,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        dtype=dtype,
    )
    if layout.num_blocks > 0:
        return layout
    num_blocks = config.kv_memory_bytes // layout.block_bytes
    if num_blocks == 0:
        raise ValueError(
            f"kv_memory_bytes = {config.kv_memory_bytes} is less than one block of {layout.block_bytes} bytes"
        )
    return structs.replace(layout, num_blocks=num_blocks)


def pool_shape(layout: KVLayout) -> tuple[int, ...]:
    """`kv[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`: a block is one contiguous run."""
    return (layout.num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory that no peer can reach: for a process of its own."""
    return torch.zeros(shape, dtype=dtype, device=device)
