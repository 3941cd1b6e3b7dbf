"""Where the sequence that gives way next would go on from, in a model with states.

Keys and values of its full blocks stay cached, but a state only where it left a checkpoint. And a sequence gives way when no
cached block is left, so no checkpoint either. Therefore the one that would be next holds its newest, and leaves one at its next
full block if none is near and there is room. That is one checkpoint in all. A short sequence is computed anew instead.
"""

from __future__ import annotations

from itertools import chain

from engine.cache.block_pool import BlockPool
from engine.sequence import Sequence, State
from worker.serving.allocation import checkpoint_distance, leave_checkpoint


class ResumePoint:
    """Holds blocks of one sequence besides the sequence itself: those up to its newest checkpoint, and the checkpoint's."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._sequence: Sequence | None = None
        self._states: tuple[State, ...] | None = None  # the sequence's when it was looked at
        self.blocks: list[int] = []
        self._reached = 0  # tokens before the checkpoint

    def keep(self, sequence: Sequence, *, spare: int) -> None:
        """Hold what this sequence needs, which gives way next. A new checkpoint leaves `spare` blocks free or cached."""
        distance = checkpoint_distance(self._pool)
        if sequence is not self._sequence or sequence.num_scheduled <= distance:
            self.drop()
        if sequence.num_scheduled <= distance:
            return
        self._sequence = sequence
        if sequence.states is not self._states:
            self._renew(sequence)
        is_due = sequence.num_scheduled - self._reached > distance and all(
            state.is_found for state in sequence.states[:-1]
        )
        if is_due and sequence.num_scheduled % self._pool.block_size == 0:
            leave_checkpoint(self._pool, sequence, sequence.num_scheduled, spare=spare)

    def give_way(self, sequence: Sequence) -> None:
        """The sequence gives way, and comes back: what is held for it becomes cached, and is evicted after what nobody found."""
        if sequence is self._sequence:
            self._pool.count_as_hit(self.blocks)
            self.drop()

    def drop(self, sequence: Sequence | None = None) -> bool:
        """Hold nothing any more, or nothing of this sequence. Returns whether blocks were held."""
        if sequence is not None and sequence is not self._sequence:
            return False
        blocks, self.blocks = self.blocks, []
        self._sequence, self._states, self._reached = None, None, 0
        self._pool.release(blocks)
        return bool(blocks)

    def _renew(self, sequence: Sequence) -> None:
        before, self._states = self.blocks, sequence.states
        blocks, beside = self._pool.match_usable(sequence.digests, is_hit=False)
        self.blocks, self._reached = [*blocks, *chain(*beside)], len(blocks) * self._pool.block_size
        self._pool.release(before)
