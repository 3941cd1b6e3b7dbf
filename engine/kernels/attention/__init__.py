"""Attention of new tokens to their context in a paged KV cache: variable lengths, chunked prefill, GQA, sliding windows.

Reading order: `plan` (what a pass attends to), `split` (how its work is cut), `dispatch` (which kernel computes it),
`reference` (the same in plain torch), and one file for each Triton kernel.
"""

from engine.kernels.attention.dispatch import copies_in_bulk, needs_qkv, paged_attention, tiling
from engine.kernels.attention.plan import (
    AttentionBatch,
    AttentionPlan,
    DecodeItems,
    HeadShape,
    KeptWindow,
    MadePlan,
    PrefillPlan,
    Scores,
    first_seen,
)
from engine.kernels.attention.split import (
    LONGEST_STEP,
    Tiling,
    deal_out,
    deal_out_tiles,
    item_queries,
    items_at_once,
    max_items,
    point,
)

__all__ = [
    "LONGEST_STEP",
    "AttentionBatch",
    "AttentionPlan",
    "DecodeItems",
    "HeadShape",
    "KeptWindow",
    "MadePlan",
    "PrefillPlan",
    "Scores",
    "Tiling",
    "copies_in_bulk",
    "deal_out",
    "deal_out_tiles",
    "first_seen",
    "item_queries",
    "items_at_once",
    "max_items",
    "needs_qkv",
    "paged_attention",
    "point",
    "tiling",
]
