"""A sequence's chunks of passes: scheduled with the checkpoints and states that they leave, and finished."""

from __future__ import annotations

from itertools import chain

from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.groups import Table, entries_of
from engine.sequence import Chunk, Sequence
from worker.serving.allocation import publish_computed


def schedule(
    pool: BlockPool,
    sequence: Sequence,
    num_tokens: int,
    *,
    drafted: tuple[int, ...] = (),
    spare: int = 0,
    leaves_ends: bool = True,
) -> Chunk:
    """Make the next positions part of a pass, and leave checkpoints on the way if more than `spare` blocks are left.

    A generation leaves one at the end of each block, since any may be its last: `drop_older_ends` keeps the newest. It takes
    room until the pass is over, so that a sequence `leaves_ends` only while nobody waits for it. A model with states verifies
    as much of a draft as `spare` blocks allow: it keeps the state behind each drafted token.
    """
    if pool.fixed:
        begin = sequence.num_scheduled
        may_end = leaves_ends and begin >= max(sequence.num_prompt_tokens, pool.checkpoint_distance)
        is_end = may_end and not begin % pool.block_size
        for number, group in enumerate(pool.groups):
            table = sequence.tables[number]
            for at in group.checkpoints(table, begin, begin + num_tokens, sequence.branches):
                go_on_afresh(pool, number, table, at, spare=spare)
            is_own = is_end and not group.grows and table.begin < begin
            if is_own and go_on_afresh(pool, number, table, begin, spare=spare):
                table.ends.append(begin)
            count = group.entries_behind(table, begin, len(drafted), sequence.branches) if drafted else None
            if count is not None:
                count = min(count, max(0, pool.num_free - spare) // group.blocks)
                table.behind = entries_of(pool.allocate(count * group.blocks), group.blocks)
                drafted = drafted[:count]
    return sequence.schedule(num_tokens, drafted)


def go_on_afresh(pool: BlockPool, number: int, table: Table, at: int, *, spare: int) -> bool:
    """Go on in a fresh entry behind the first `at` tokens, if more than `spare` blocks are left; return whether they are."""
    try:
        fresh = tuple(pool.allocate(pool.groups[number].blocks, spare=spare))
    except OutOfBlocksError:
        return False
    table.go_on_in(fresh, at, pool.block_size)
    return True


def finish(pool: BlockPool, chunk: Chunk, num_accepted: int = 0) -> None:
    """Record the end of a pass with `chunk`, share what it made final, and let go of the states behind rejected drafts."""
    sequence = chunk.sequence
    for table in sequence.tables if chunk.drafted else ():
        if table.behind:
            unneeded = table.accept(chunk.start, num_accepted, pool.block_size, shortest=pool.checkpoint_distance)
            pool.release([*chain(*unneeded)])
    sequence.finish(chunk, num_accepted)
    publish_computed(pool, sequence)
