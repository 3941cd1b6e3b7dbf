"""Sliding-window columns: blocks of window layers beside each block of tokens, of which a sequence keeps the last ones.

A prompt is admitted with columns of a window and of the chunks in flight. What passes leave behind makes room for the next
chunk's: as many columns are taken as went, at the same moment. So a prompt that was admitted waits for nobody. For that, it must
hold its columns alone: until it has all of them, it publishes one only as it goes. What it found doesn't count.

Passes in flight begin where the last finished pass ended, or behind that. So a finished pass alone lets columns go.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from itertools import chain, zip_longest

from engine.cache.block_pool import BlockPool
from engine.cache.pages import COLUMN_MARGIN as MARGIN
from engine.sequence import Sequence, first_column
from kvtransfer.cargo import Cargo

# In tokens: a prompt with fewer columns ahead would take too many passes.
LEAST_AHEAD = 512


def oldest_needed(pool: BlockPool, num_tokens: int) -> int:
    """The first column needed after so many tokens.

    The last full block's first token counts: from there a sequence that gave way is found again.
    """
    return first_column(num_tokens // pool.block_size * pool.block_size, pool.window, pool.block_size)


def cargo_of(pool: BlockPool, num_tokens: int) -> Cargo:
    """The cargo of a prompt of so many tokens."""
    return Cargo(
        num_tokens=num_tokens,
        block_size=pool.block_size,
        state_blocks=pool.state_blocks,
        column_blocks=pool.column_blocks,
        first_column=oldest_needed(pool, num_tokens),
    )


def longest_sequence(pool: BlockPool) -> int:
    """Tokens of the longest sequence that fits into the empty pool."""
    num_blocks, columns = pool.num_blocks - pool.state_blocks, pool.column_blocks
    if columns:
        num_blocks = max(num_blocks // (1 + columns), num_blocks - columns * (pool.window_columns + MARGIN))
    return num_blocks * pool.block_size


def num_columns(pool: BlockPool, num_blocks: int, ahead: int | None, *, cached: int, seen: int, spare: int) -> int:
    """Number of columns that a sequence of `num_blocks` blocks takes at admission, with `cached` of them found.

    `ahead`: tokens that passes may compute before columns go; None: all. `seen`: found columns. It waits for the columns of
    `LEAST_AHEAD` tokens, or for all that fit beside its blocks. More are taken while there is room.
    """
    if not pool.column_blocks:
        return 0
    lacking, size = num_blocks - cached, pool.block_size
    if ahead is None:
        return lacking
    fitting = (pool.num_blocks - num_blocks) // pool.column_blocks - seen
    most = pool.window_columns + MARGIN - (-ahead // size)
    least = pool.window_columns + MARGIN - (-min(ahead, LEAST_AHEAD) // size)
    room = (pool.num_free - spare - lacking) // pool.column_blocks
    return max(0, min(lacking, fitting, max(least, min(most, room))))


def has_room_of_its_own(pool: BlockPool, num_blocks: int, *, cached: int, seen: int) -> bool:
    """True if a sequence of so many blocks fits beside cached columns, which others may hold for longer."""
    own = min(num_blocks - cached, pool.window_columns + MARGIN)
    return num_blocks + pool.column_blocks * (seen + own) <= pool.num_blocks


def cover(pool: BlockPool, sequence: Sequence, num_tokens: int, *, spare: int = 0) -> int:
    """Take columns for the next `num_tokens` positions, leaving `spare` blocks; return the number of covered positions."""
    size, columns = pool.block_size, pool.column_blocks
    if not columns:
        return num_tokens
    missing = -(-(sequence.num_scheduled + num_tokens) // size) - len(sequence.columns)
    if missing > 0:
        count = min(missing, max(0, pool.num_free - spare) // columns)
        extend(sequence, pool.allocate(count * columns), columns)
    return max(0, min(num_tokens, len(sequence.columns) * size - sequence.num_scheduled))


def let_go(pool: BlockPool, sequence: Sequence) -> None:
    """Release columns outside the window of the next tokens, and reuse as many for uncovered blocks.

    What goes is shared, and all that is final once there is nothing to take any more.
    """
    columns = sequence.columns
    first = at = min(oldest_needed(pool, sequence.num_computed), len(columns))
    while at and columns[at - 1]:
        at -= 1
    if at < first:
        _share(pool, sequence, first)
        gone, before = columns[at:first], pool.num_free
        columns[at:first] = [()] * (first - at)
        pool.release([*chain(*gone)])
        lacking = max(0, len(sequence.block_table) - len(columns))
        count = min(lacking, (pool.num_free - before) // pool.column_blocks)
        extend(sequence, pool.allocate(count * pool.column_blocks), pool.column_blocks)
    if len(columns) >= len(sequence.block_table):
        _share(pool, sequence, len(sequence.digests))


def _share(pool: BlockPool, sequence: Sequence, end: int) -> None:
    """Publish the columns before entry `end`."""
    for at in range(sequence.num_shared_columns, end):
        if column := sequence.columns[at]:
            pool.publish_beside(column, sequence.digests, at + 1)
    sequence.num_shared_columns = max(sequence.num_shared_columns, end)


def extend(sequence: Sequence, blocks: ListOf[int], column_blocks: int) -> None:
    """Append these blocks to a sequence's columns."""
    sequence.columns.extend(tuple(blocks[at : at + column_blocks]) for at in range(0, len(blocks), column_blocks))


def num_held(pool: BlockPool, sequence: Sequence) -> int:
    """Number of blocks in a sequence's live columns, cached ones included."""
    needed = len(sequence.columns) - oldest_needed(pool, sequence.num_computed)
    return pool.column_blocks * max(0, needed) if sequence.columns else 0


def tokens_and_columns(sequence: Sequence) -> list[int]:
    """All token blocks of a sequence, each with its column: released from the end, so that a prefix stays resumable."""
    if not sequence.columns:
        return list(sequence.block_table)
    blocks = [(block,) for block in sequence.block_table]
    return [*chain(*chain(*zip_longest(blocks, sequence.columns, fillvalue=())))]
