"""Attention to chosen positions: an indexer's small queries and keys give each position a score, the highest are attended to.

Reading order: `choosing` (keys, scores, the choice), `attention` (over the chosen latents), and their Triton versions.
"""

from engine.kernels.sparse.attention import chosen_attention
from engine.kernels.sparse.choosing import chosen_positions, sees_more, write_keys

__all__ = ["chosen_attention", "chosen_positions", "sees_more", "write_keys"]
