"""The room that a sequence takes in a pool, in positions like all of placement: a block has `block_size`, whatever is in it."""

from __future__ import annotations

from common.pages import KVLayout


def room_for(layout: KVLayout, num_tokens: int) -> int:
    """Return what a sequence of so many tokens holds at most while it is decoded, in all KV groups."""
    return num_tokens + layout.block_size * layout.blocks_beside(num_tokens)
