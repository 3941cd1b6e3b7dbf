"""The block pool: sharing, eviction, events, and what holds after any sequence of operations."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine.cache.block_pool import BlockPool, OutOfBlocksError
from tests.examples import examples
from tests.unit.engine.pool_holders import Holders
from tests.unit.engine.tables import groups_with, resumed


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def published(pool: BlockPool, *numbers: int) -> list[int]:
    """Allocate a block for each number and publish it under that digest."""
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        pool.publish(block, digest(number))
    return blocks


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.release(published(pool, 1, 2))
    held = pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="4 blocks wanted, 3 of 4"):
        pool.allocate(4)
    with pytest.raises(OutOfBlocksError, match="2 to be left"):
        pool.allocate(2, spare=2)
    assert pool.num_free == 3
    assert pool.num_cached == 2
    assert pool.cached_digests() == [digest(1), digest(2)]
    assert pool.allocate(0) == []
    pool.release(pool.allocate(1, spare=2))
    pool.release(held)


def test_a_released_prefix_is_found_again_up_to_the_first_gap() -> None:
    pool = BlockPool(num_blocks=8, block_size=16)
    blocks = published(pool, 1, 2, 4)
    pool.release(blocks)
    assert pool.match_prefix([digest(1), digest(2), digest(3), digest(4)]) == blocks[:2]
    assert pool.num_cached == 1
    assert pool.match_prefix([digest(3), digest(4)]) == []


def test_blocks_in_use_are_shared() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    (block,) = published(pool, 1)
    assert pool.match_prefix([digest(1)]) == [block]
    pool.release([block])
    assert pool.num_used == 1  # the other holder still has it
    pool.release([block])
    assert pool.num_used == 0


def test_a_block_that_was_never_published_is_forgotten_on_release() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    pool.release(pool.allocate(2))
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.release(published(pool, 1, 2))
    pool.allocate(2)
    assert pool.cached_digests() == [digest(1), digest(2)]


def test_the_least_recently_released_sequence_is_evicted_from_its_end() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    old, new = published(pool, 1, 2), published(pool, 3, 4)
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert pool.cached_digests() == [digest(1), digest(3), digest(4)]
    pool.allocate(2)
    assert pool.cached_digests() == [digest(3)]


def test_a_hit_makes_a_block_recent() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    for number in (1, 2):
        pool.release(published(pool, number))
    pool.release(pool.match_prefix([digest(1)]))
    pool.allocate(1)
    assert pool.cached_digests() == [digest(1)]


def test_what_was_found_again_outlives_what_was_not() -> None:
    """However much of the latter comes later."""
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.release(published(pool, 1, 2))
    pool.release(pool.match_prefix([digest(1)]))
    for number in range(10, 20):
        pool.release(published(pool, number, number + 10))
    assert digest(1) in pool.cached_digests()
    assert digest(2) not in pool.cached_digests()


def test_what_was_found_again_takes_half_the_pool_at_most() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    for number in (1, 2, 3):
        pool.release(published(pool, number))
        pool.release(pool.match_prefix([digest(number)]))
    pool.release(published(pool, 4))
    pool.release(pool.allocate(1))  # 1 counts as never found, and is older than 4
    assert pool.cached_digests() == [digest(2), digest(3), digest(4)]
    assert pool.num_cached == 3
    held = pool.allocate(4)  # all can be evicted
    assert (pool.num_free, pool.num_cached) == (0, 0)
    pool.release(held)


def test_counting_a_prefix_is_no_use_of_it() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    for number in (1, 2):
        pool.release(published(pool, number))
    assert pool.count_prefix([digest(1), digest(3), digest(2)]) == 1
    pool.allocate(1)
    assert pool.cached_digests() == [digest(2)]


def test_the_first_publisher_of_a_digest_wins() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    (first,), (second,) = published(pool, 1), published(pool, 1)
    pool.publish(first, digest(1))  # again is harmless
    assert pool.match_prefix([digest(1)]) == [first]
    pool.release([second])
    assert pool.num_cached == 0
    with pytest.raises(ValueError, match="another digest"):
        pool.publish(first, digest(2))


def test_a_cached_block_gives_way_to_a_held_one_of_the_same_content() -> None:
    """It would be evicted sooner, and leave a gap in the later sequence's prefix."""
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.release(published(pool, 1))
    blocks = published(pool, 1, 2)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.release(pool.allocate(2))
    assert pool.match_prefix([digest(1), digest(2)]) == blocks
    assert pool.drain_events() == ([digest(1), digest(2)], [])


def test_what_gave_way_leaves_its_successor_that_it_was_found() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.release(published(pool, 1))
    pool.release(pool.match_prefix([digest(1)]))
    pool.release(published(pool, 1))
    pool.release(published(pool, 2))  # in the block that had been found
    pool.allocate(3)
    assert pool.cached_digests() == [digest(1)]


@pytest.mark.parametrize("misuse", ["release", "publish"])
def test_touching_a_block_that_nobody_holds_raises(misuse: str) -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    arguments = (blocks[0], digest(1)) if misuse == "publish" else (blocks,)
    with pytest.raises(ValueError, match="nobody holds"):
        getattr(pool, misuse)(*arguments)
    with pytest.raises(ValueError, match="not in a pool of 2"):
        pool.release([-1])
    assert pool.num_free == 2


def test_releasing_one_reference_twice_raises_and_loses_nothing() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release([block, block])
    assert pool.num_free == 2


def test_events_tell_what_changed_since_the_last_call() -> None:
    pool = BlockPool(num_blocks=2, block_size=16)
    pool.release(published(pool, 1, 2))
    assert pool.drain_events() == ([digest(1), digest(2)], [])
    assert pool.drain_events() == ([], [])
    pool.release(pool.allocate(1))  # evicts 2
    assert pool.drain_events() == ([], [digest(2)])


def test_events_that_cancel_out_are_not_told() -> None:
    pool = BlockPool(num_blocks=1, block_size=16)
    pool.release(published(pool, 1))
    pool.release(pool.allocate(1))
    assert pool.drain_events() == ([], [])
    pool.release(published(pool, 1))
    pool.drain_events()
    pool.release(pool.allocate(1))
    pool.release(published(pool, 1))
    assert pool.drain_events() == ([], [])


def test_what_proved_wrong_is_not_found_again() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    blocks = [*published(pool, 1, 2), *pool.allocate(1)]
    assert pool.match_prefix([digest(1)]) == blocks[:1]  # somebody else computes with it already
    pool.withdraw(blocks)
    assert pool.match_prefix([digest(1), digest(2)]) == []
    assert pool.drain_events() == ([], [])
    pool.release(blocks)
    pool.release(blocks[:1])
    assert (pool.num_free, pool.num_cached) == (4, 0)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.withdraw(blocks)


def with_checkpoints(pool: BlockPool, *lengths: int) -> tuple[list[int], list[list[int]]]:
    """Publish blocks 1, 2, … and a state behind each of these lengths."""
    blocks, digests = published(pool, *range(1, max(lengths) + 1)), [digest(at) for at in range(1, max(lengths) + 1)]
    states = []
    for length in lengths:
        states.append(pool.allocate(pool.fixed))
        pool.publish_entry(1, tuple(states[-1]), digests, length)
    return blocks, states


def test_a_prefix_is_found_again_up_to_its_last_checkpoint() -> None:
    pool = BlockPool(num_blocks=12, block_size=16, groups=groups_with(16, state_blocks=2))
    blocks, (first, second) = with_checkpoints(pool, 1, 3)
    for held in (first, second, blocks):
        pool.release(held)
    digests = [digest(at) for at in range(1, 6)]
    assert resumed(pool, digests) == (blocks[:3], [tuple(second)])
    assert resumed(pool, digests[:2]) == (blocks[:1], [tuple(first)])
    assert pool.num_used == 7


def test_a_checkpoint_that_lost_a_block_is_forgotten_whole() -> None:
    pool = BlockPool(num_blocks=9, block_size=16, groups=groups_with(16, state_blocks=3))
    blocks, (first, second) = with_checkpoints(pool, 1, 3)
    for held in (second, first, blocks):
        pool.release(held)
    assert pool.num_cached == 9
    pool.allocate(1)
    assert (pool.num_free, pool.num_cached) == (8, 6)  # the other two of `second` are free
    digests = [digest(at) for at in range(1, 4)]
    assert resumed(pool, digests) == (blocks[:1], [tuple(first)])
    assert pool.match_prefix(digests) == blocks


def test_only_what_can_be_gone_on_from_is_told() -> None:
    pool = BlockPool(num_blocks=10, block_size=16, groups=groups_with(16, state_blocks=2))
    blocks, (first, second) = with_checkpoints(pool, 1, 3)
    (last,) = published(pool, 4)
    assert pool.drain_events() == ([digest(1), digest(2), digest(3)], [])
    assert pool.cached_digests() == [digest(1), digest(2), digest(3)]
    pool.release(second)
    spare = pool.allocate(pool.num_free - 1)  # takes one of them
    assert pool.drain_events() == ([], [digest(3), digest(2)])
    pool.release(first)
    pool.release(spare)
    more = pool.allocate(2)
    pool.publish_entry(1, tuple(more), [digest(at) for at in range(1, 5)], 4)
    assert pool.drain_events() == ([digest(2), digest(3), digest(4)], [])
    pool.release([*blocks, last, *more])


def test_a_state_that_proved_wrong_is_not_found_again() -> None:
    pool = BlockPool(num_blocks=10, block_size=16, groups=groups_with(16, state_blocks=2))
    blocks, (first, second) = with_checkpoints(pool, 1, 3)
    digests = [digest(at) for at in range(1, 4)]
    assert resumed(pool, digests) == (blocks, [tuple(second)])  # somebody computes with it
    pool.release(first)
    pool.withdraw([*blocks, *second], digests)
    for _ in range(2):
        pool.release([*blocks, *second])
    assert (pool.num_free, pool.num_cached) == (10, 0)
    blocks = published(pool, 1, 2, 3)
    assert resumed(pool, digests) == ([], [])
    assert pool.drain_events() == ([], [])


def test_the_first_publisher_of_a_state_wins() -> None:
    pool = BlockPool(num_blocks=8, block_size=16, groups=groups_with(16, state_blocks=2))
    _, (first,) = with_checkpoints(pool, 1)
    second = pool.allocate(2)
    pool.publish_entry(1, tuple(second), [digest(1)], 1)
    pool.publish_entry(1, tuple(first), [digest(1)], 1)
    assert resumed(pool, [digest(1)])[1] == [tuple(first)]
    with pytest.raises(ValueError, match="published under another digest already"):
        pool.publish_entry(1, tuple(first), [digest(2)], 1)
    pool.release(second)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.publish_entry(1, tuple(second), [digest(2)], 1)


class PoolMachine(Holders):
    """Random holders against a model that only counts references and remembers contents."""

    def __init__(self) -> None:
        super().__init__(BlockPool(num_blocks=6, block_size=16))
        self.content: dict[int, int] = {}  # block -> number it was published under, since it was last allocated

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        in_use = self.in_use
        if count > 6 - len(in_use):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not in_use & set(blocks), "a referenced block was given away"
        for block in blocks:
            self.content.pop(block, None)
        self.holds.append(blocks)

    @rule(first=st.integers(0, 9), length=st.integers(1, 4))
    def match(self, first: int, length: int) -> None:
        blocks = self.pool.match_prefix([digest(number) for number in range(first, first + length)])
        assert [self.content[block] for block in blocks] == list(range(first, first + len(blocks)))
        self.holds.append(blocks)

    @precondition(lambda self: any(self.holds))
    @rule(choice=st.randoms(use_true_random=False), number=st.integers(0, 9))
    def publish(self, choice: object, number: int) -> None:
        block = choice.choice([block for hold in self.holds for block in hold])  # type: ignore[attr-defined]
        if self.content.get(block, number) != number:
            with pytest.raises(ValueError, match="another digest"):
                self.pool.publish(block, digest(number))
            return
        self.pool.publish(block, digest(number))
        first = next((known for known, own in self.content.items() if own == number), None)
        if first not in self.in_use:
            self.content.pop(first, None)
            self.content[block] = number

    @precondition(lambda self: self.holds)
    @rule(choice=st.randoms(use_true_random=False))
    def withdraw(self, choice: object) -> None:
        hold = choice.choice(self.holds)  # type: ignore[attr-defined]
        self.pool.withdraw(hold)
        for block in hold:
            self.content.pop(block, None)

    @invariant()
    def what_nobody_holds_is_cached(self) -> None:
        assert self.pool.num_cached == len(self.content.keys() - self.in_use)
        assert set(self.pool.cached_digests()) == {digest(number) for number in self.content.values()}


class StatesMachine(Holders):
    """Random sequences that leave checkpoints, against a model of which are whole."""

    def __init__(self) -> None:
        super().__init__(BlockPool(num_blocks=12, block_size=16, groups=groups_with(16, state_blocks=2)))

    @staticmethod
    def chain(branch: int, length: int) -> list[bytes]:
        """Prefixes that differ from their third block on."""
        return [digest(at if at < 2 else 10 * branch + at) for at in range(length)]

    @rule(branch=st.integers(1, 2), length=st.integers(1, 4), places=st.sets(st.integers(1, 4)))
    def run(self, branch: int, length: int, places: set[int]) -> None:
        digests = self.chain(branch, length)
        blocks, states = resumed(self.pool, digests)
        assert [len(state) for state in states] == ([2] if blocks else [])
        hold = [*blocks, *(block for state in states for block in state)]
        self.holds.append(hold)
        try:
            fresh = self.pool.allocate(length - len(blocks))
        except OutOfBlocksError:
            return
        hold += fresh
        for at, block in enumerate(fresh, start=len(blocks)):
            self.pool.publish(block, digests[at])
        for place in sorted(place for place in places if len(blocks) < place <= length):
            try:
                own = self.pool.allocate(2)
            except OutOfBlocksError:
                return
            hold += own
            self.pool.publish_entry(1, tuple(own), digests, place)
            found, [state] = resumed(self.pool, digests[:place])
            assert (len(found), len(state)) == (place, 2)
            self.pool.release([*found, *state])

    @rule(count=st.integers(1, 4))
    def squeeze(self, count: int) -> None:
        """Others need blocks for a moment."""
        if count <= self.pool.num_free:
            self.pool.release(self.pool.allocate(count))

    @precondition(lambda self: self.holds)
    @rule(choice=st.randoms(use_true_random=False), branch=st.integers(1, 2))
    def withdraw(self, choice: object, branch: int) -> None:
        digests = self.chain(branch, 4)
        self.pool.withdraw(choice.choice(self.holds), digests)  # type: ignore[attr-defined]
        assert resumed(self.pool, digests) == ([], [])

    @invariant()
    def only_what_can_be_gone_on_from_is_told(self) -> None:
        pool = self.pool
        assert len({*pool._free, *pool.retention, *self.in_use}) == 12
        for branch in (1, 2):
            usable = [length for length in range(1, 5) if self.chain(branch, length)[-1] in pool._entries[1]]
            for at, each in enumerate(self.chain(branch, 4)):
                told = each in pool.cached_digests()
                assert not told or any(length > at for length in usable) or at < 2


TestPoolMachine = PoolMachine.TestCase
TestStatesMachine = StatesMachine.TestCase
TestPoolMachine.settings = TestStatesMachine.settings = examples(25, stateful_step_count=40)
