"""Random holders of a pool's blocks, for state machines that add what is published and found."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.block_pool import BlockPool


class Holders(RuleBasedStateMachine):
    """Who holds which blocks, and what a listener to the events believes: of any pool."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self.pool = pool
        self.holds: list[list[int]] = []  # each entry: one reference on each of its blocks
        self.index: set[bytes] = set()

    @property
    def in_use(self) -> set[int]:
        return {block for hold in self.holds for block in hold}

    @precondition(lambda self: self.holds)
    @rule(choice=st.randoms(use_true_random=False))
    def release(self, choice: object) -> None:
        hold = choice.choice(self.holds)  # type: ignore[attr-defined]
        self.pool.release(hold)
        self.holds.remove(hold)

    @rule()
    def listen(self) -> None:
        added, removed = self.pool.drain_events()
        assert not self.index & set(added)
        assert set(removed) <= self.index
        self.index = (self.index | set(added)) - set(removed)
        assert self.index == set(self.pool.cached_digests())

    @invariant()
    def every_block_is_counted_once(self) -> None:
        assert self.pool.num_used == len(self.in_use)
        assert self.pool.num_used + self.pool.num_free == self.pool.num_blocks
