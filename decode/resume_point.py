"""The resume point of the next victim of preemption, in a model with more than one KV group.

Keys and values of its full blocks stay cached, but a recurrent state only where it left a checkpoint. And a sequence gives way
when no cached block is left, so no checkpoint either. Therefore the one that would be next holds its newest, and leaves one at
its next full block if none is near and there is room. That is one checkpoint in all. A short sequence is computed anew instead.

With windows all is cached that it needs to go on from its last full block. But the first block that others take is one of
those. Therefore it holds the entries of a place some blocks back; what is behind that goes first. That is half a window at most.
"""

from __future__ import annotations

from itertools import chain

from engine.cache.block_pool import BlockPool
from engine.sequence import Sequence
from worker.serving.chunks import go_on_afresh


def resume_distance(pool: BlockPool) -> int:
    """Tokens that a sequence computes before the place that it would go on from is chosen anew."""
    return max(group.resume_distance for group in pool.groups)


class ResumePoint:
    """Holds blocks of one sequence besides the sequence itself: those that it needs to go on from a place behind its prompt."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._sequence: Sequence | None = None
        self.blocks: list[int] = []
        self._reached = 0  # tokens before the place that is held
        self._gone: list[int] = []  # entries that had gone when it was chosen, by group
        self._computed = 0  # tokens, likewise

    def keep(self, sequence: Sequence, *, spare: int) -> None:
        """Hold what this sequence needs, which gives way next. A new checkpoint leaves `spare` blocks free or cached."""
        pool, distance = self._pool, resume_distance(self._pool)
        is_short = sequence.num_scheduled <= distance
        # A prompt's own windows make room for its next ones as they go.
        is_prompt = pool.growth > 1 and sequence.num_unscheduled > 1
        if is_short or is_prompt:
            self.drop()
            return
        if sequence is not self._sequence:
            self.drop()
        self._sequence = sequence
        held = list(zip(pool.groups, sequence.tables, strict=True))
        computed = sequence.num_computed - self._computed
        if not self._gone or any(
            group.resumes_later(gone=table.num_gone - gone, computed=computed)
            for (group, table), gone in zip(held, self._gone, strict=True)
        ):
            self._renew(sequence)
        if sequence.num_scheduled - self._reached <= distance or sequence.num_scheduled % pool.block_size:
            return
        for number, (group, table) in enumerate(held):
            if group.resumes_afresh(table, sequence.num_scheduled):
                go_on_afresh(pool, number, table, sequence.num_scheduled, spare=spare)

    def give_way(self, sequence: Sequence) -> None:
        """Release the blocks at its preemption: they become cached, and are evicted after blocks without hits."""
        if sequence is self._sequence:
            self._pool.count_as_hit(self.blocks)
            self.drop()

    def drop(self, sequence: Sequence | None = None) -> bool:
        """Release the resume point; with `sequence`, only if it belongs to that sequence. Return whether blocks were held."""
        if sequence is not None and sequence is not self._sequence:
            return False
        blocks, self.blocks = self.blocks, []
        self._sequence, self._reached, self._gone = None, 0, []
        self._pool.release(blocks)
        return bool(blocks)

    def _renew(self, sequence: Sequence) -> None:
        self._gone, self._computed = [table.num_gone for table in sequence.tables], sequence.num_computed
        before, found = self.blocks, self._pool.match_resumable(sequence.digests, is_hit=False)
        self.blocks, self._reached = [*chain(*chain(*found))], len(found[0]) * self._pool.block_size
        self._pool.release(before)
