"""A sequence's chunks of passes: scheduled with the checkpoints and states that they leave, and finished."""

from __future__ import annotations

from itertools import chain

from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.groups import Table, entries_of
from engine.sequence import Chunk, Sequence
from worker.serving.allocation import publish_computed


def schedule(
    pool: BlockPool, sequence: Sequence, num_tokens: int, *, drafted: tuple[int, ...] = (), spare: int = 0
) -> Chunk:
    """Make the next positions part of a pass, and leave checkpoints on the way if more than `spare` blocks are left.

    A model with states verifies as much of a draft as `spare` blocks allow: it keeps the state behind each drafted token.
    """
    if pool.fixed:
        begin = sequence.num_scheduled
        for number, group in enumerate(pool.groups):
            table = sequence.tables[number]
            for at in group.checkpoints(table, begin, begin + num_tokens, sequence.branches):
                go_on_afresh(pool, number, table, at, spare=spare)
            count = group.entries_behind(table, begin, len(drafted), sequence.branches) if drafted else None
            if count is not None:
                count = min(count, max(0, pool.num_free - spare) // group.blocks)
                table.behind = entries_of(pool.allocate(count * group.blocks), group.blocks)
                drafted = drafted[:count]
    return sequence.schedule(num_tokens, drafted)


def go_on_afresh(pool: BlockPool, number: int, table: Table, at: int, *, spare: int) -> None:
    """Go on in a fresh entry behind the first `at` tokens, if more than `spare` blocks are left."""
    try:
        fresh = tuple(pool.allocate(pool.groups[number].blocks, spare=spare))
    except OutOfBlocksError:
        return
    table.go_on_in(fresh, at, pool.block_size)


def finish(pool: BlockPool, chunk: Chunk, num_accepted: int = 0) -> None:
    """Record the end of a pass with `chunk`, share what it made final, and let go of the states behind rejected drafts."""
    sequence = chunk.sequence
    for table in sequence.tables if chunk.drafted else ():
        if table.behind:
            pool.release([*chain(*table.accept(chunk.start // pool.block_size, num_accepted))])
    sequence.finish(chunk, num_accepted)
    publish_computed(pool, sequence)
