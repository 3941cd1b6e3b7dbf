"""Sparse attention (DeepSeek's DSA): an indexer's small queries and keys score each position, and the top-k are attended to.

Reading order: `selection` (keys, scores, the top-k), `attention` (over the selected latents), and their Triton versions.
"""

from engine.kernels.sparse.attention import sparse_attention
from engine.kernels.sparse.selection import sees_more, selected_positions, write_keys

__all__ = ["sees_more", "selected_positions", "sparse_attention", "write_keys"]
