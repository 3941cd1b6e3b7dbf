"""The memory behind the block ids: how large, in which shape, and where it comes from by default."""

from __future__ import annotations

import torch
from msgspec import structs

from common.messages import KVLayout
from engine.config import EngineConfig
from engine.models.config import DecoderConfig

DEFAULT_CPU_BYTES = 256 << 20
SPARED = 0.06  # of a GPU's memory: graphs, the libraries' workspaces, fragments


def plan_layout(decoder: DecoderConfig, config: EngineConfig, dtype: str) -> KVLayout:
    """Return the pool's layout: `config.num_blocks` blocks, or as many as fit into `config.kv_memory_bytes`.

    With neither given, on a GPU: as many as fit into what is free now, when the weights are there, and a pass does not need.
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
    memory = config.kv_memory_bytes
    if memory is None:
        memory = DEFAULT_CPU_BYTES if config.device == "cpu" else _free_bytes(decoder, config)
    num_blocks = memory // layout.block_bytes
    if num_blocks <= 0:
        raise ValueError(f"{memory} bytes of memory for KV are less than one block of {layout.block_bytes} bytes")
    return structs.replace(layout, num_blocks=num_blocks)


def _free_bytes(decoder: DecoderConfig, config: EngineConfig) -> int:
    free, total = torch.cuda.mem_get_info(config.device)
    # the widest moment of a pass: the MLP's input, its two halves and their product; and the logits, twice, in float32
    token_bytes = 2 * (4 * decoder.hidden_size + 3 * decoder.intermediate_size)
    logits_bytes = 8 * decoder.vocab_size * min(config.max_sequences, config.max_batch_tokens)
    return free - config.max_batch_tokens * token_bytes - logits_bytes - int(SPARED * total)


def pool_shape(layout: KVLayout) -> tuple[int, ...]:
    """`kv[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`: a block is one contiguous run."""
    return (layout.num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory that no peer can reach: for a process of its own."""
    return torch.zeros(shape, dtype=dtype, device=device)
