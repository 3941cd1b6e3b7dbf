"""How much of a pool a sequence takes. In positions, as all of placement counts: a block has `block_size`, whatever is in it."""

from __future__ import annotations

from common.pages import KVLayout

# Columns besides those that a window reaches into: of the block that is written, and of the next one.
MARGIN = 2


def room_for(layout: KVLayout, num_tokens: int) -> int:
    """Return what a sequence of so many tokens holds at most while it is decoded, with its state or its windows' columns."""
    size = layout.block_size
    columns = min(-(-num_tokens // size), -(-(layout.window - 1) // size) + MARGIN)
    return num_tokens + size * (layout.state_blocks + layout.column_blocks * columns)
