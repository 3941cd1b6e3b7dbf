"""The room that a sequence takes in a pool, in positions like all of placement: a block has `block_size`, whatever is in it."""

from __future__ import annotations

from common.pages import KVLayout

# Columns beyond the window's: those of the block being written, and of the next one.
MARGIN = 2


def room_for(layout: KVLayout, num_tokens: int) -> int:
    """Return the most positions that a decoding sequence of so many tokens holds, with its state or columns."""
    size = layout.block_size
    columns = min(-(-num_tokens // size), -(-(layout.window - 1) // size) + MARGIN)
    return num_tokens + size * (layout.state_blocks + layout.column_blocks * columns)
