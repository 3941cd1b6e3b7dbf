"""The resume point of the next victim of preemption, in a model with recurrent states or sliding windows.

Keys and values of its full blocks stay cached, but a state only where it left a checkpoint. And a sequence gives way when no
cached block is left, so no checkpoint either. Therefore the one that would be next holds its newest, and leaves one at its next
full block if none is near and there is room. That is one checkpoint in all. A short sequence is computed anew instead.

With windows all is cached that it needs to go on from its last full block. But the first block that others take is one of
those. Therefore it holds the columns of a place some blocks back; what is behind that goes first. That is half a window at most.
"""

from __future__ import annotations

from itertools import chain

from engine.cache.block_pool import BlockPool
from engine.sequence import Sequence, State
from worker.serving.allocation import checkpoint_distance, leave_checkpoint


def resume_distance(pool: BlockPool) -> int:
    """Tokens that a sequence computes before its resume point is moved."""
    if pool.column_blocks:
        return max(1, pool.window_columns // 2) * pool.block_size
    return checkpoint_distance(pool)


class ResumePoint:
    """Holds blocks for one sequence besides its own: those up to its newest checkpoint, and the checkpoint's."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._sequence: Sequence | None = None
        self._states: tuple[State, ...] | None = None  # the sequence's states when the point was set
        self.blocks: list[int] = []
        self._reached = 0  # tokens before the resume point
        self._looked_at = 0  # computed tokens when the point was set

    def keep(self, sequence: Sequence, *, spare: int) -> None:
        """Hold the blocks of this sequence, the next victim. A new checkpoint leaves `spare` blocks free or cached."""
        distance = resume_distance(self._pool)
        is_short = sequence.num_scheduled <= distance
        # A prompt's own columns make room for its next ones as the window slides.
        is_prompt = bool(self._pool.column_blocks) and sequence.num_unscheduled > 1
        if is_short or is_prompt:
            self.drop()
            return
        if sequence is not self._sequence:
            self.drop()
        self._sequence = sequence
        if self._pool.column_blocks:
            if not self._looked_at or sequence.num_computed - self._looked_at > distance:
                self._renew(sequence)
            return
        if sequence.states is not self._states:
            self._renew(sequence)
        is_due = sequence.num_scheduled - self._reached > distance and all(
            state.is_found for state in sequence.states[:-1]
        )
        if is_due and sequence.num_scheduled % self._pool.block_size == 0:
            leave_checkpoint(self._pool, sequence, sequence.num_scheduled, spare=spare)

    def give_way(self, sequence: Sequence) -> None:
        """Release the blocks at its preemption: they become cached, and are evicted after blocks without hits."""
        if sequence is self._sequence:
            self._pool.count_as_hit(self.blocks)
            self.drop()

    def drop(self, sequence: Sequence | None = None) -> bool:
        """Release the resume point; with `sequence`, only if it belongs to that sequence. Returns True if blocks were held."""
        if sequence is not None and sequence is not self._sequence:
            return False
        blocks, self.blocks = self.blocks, []
        self._sequence, self._states, self._reached, self._looked_at = None, None, 0, 0
        self._pool.release(blocks)
        return bool(blocks)

    def _renew(self, sequence: Sequence) -> None:
        before, self._states, self._looked_at = self.blocks, sequence.states, sequence.num_computed
        blocks, beside = self._pool.match_usable(sequence.digests, is_hit=False)
        self.blocks, self._reached = [*blocks, *chain(*beside)], len(blocks) * self._pool.block_size
        self._pool.release(before)
