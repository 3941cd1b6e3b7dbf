"""A pool with a window's entries: what is found again, what is forgotten with what, and what the index is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.cache.resumable import ResumablePrefixes
from tests.examples import examples
from tests.unit.engine.pool_holders import Holders
from tests.unit.engine.tables import groups_with, resumed

M, SEEN = 2, 3  # blocks of a column, and columns that a window of nine positions reaches into


def new_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=4, groups=groups_with(4, window=10, window_blocks=M))


def chain(branch: int, length: int) -> list[bytes]:
    """Digests of prefixes that differ from their third block on."""
    return [(at if at < 2 else 100 * branch + at).to_bytes(16, "little") for at in range(length)]


def computed(pool: BlockPool, digests: list[bytes]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Blocks and columns of a sequence that computed them, all held."""
    blocks = pool.allocate(len(digests))
    columns = [tuple(pool.allocate(M)) for _ in digests]
    for at, (block, column) in enumerate(zip(blocks, columns, strict=True), start=1):
        pool.publish(block, digests[at - 1])
        pool.publish_entry(1, column, digests, at)
    return blocks, columns


def lose(pool: BlockPool, column: tuple[int, ...]) -> None:
    """The column proved wrong, and is nobody's."""
    pool.withdraw(column)
    pool.release(column)


def test_a_hit_has_the_columns_that_the_next_token_sees() -> None:
    pool, digests = new_pool(30), chain(1, 6)
    blocks, columns = computed(pool, digests)
    assert resumed(pool, digests) == (blocks, columns[3:])
    assert resumed(pool, digests[:2]) == (blocks[:2], columns[:2])
    assert [pool._references[block] for block in (blocks[0], blocks[2], columns[0][0], columns[4][1])] == [3, 2, 2, 2]


def test_a_hit_ends_before_the_first_token_that_sees_a_gap() -> None:
    pool, digests = new_pool(30), chain(1, 8)
    blocks, columns = computed(pool, digests)
    lose(pool, columns[2])
    assert resumed(pool, digests) == (blocks, columns[5:])
    lose(pool, columns[5])
    assert resumed(pool, digests) == (blocks[:2], columns[:2])
    lose(pool, columns[1])
    assert resumed(pool, digests) == (blocks[:1], columns[:1])
    lose(pool, columns[0])
    assert resumed(pool, digests) == ([], [])
    assert pool.match_prefix(digests) == blocks


def test_a_column_that_lost_a_block_is_forgotten_whole() -> None:
    pool, digests = new_pool(9), chain(1, 3)
    blocks, columns = computed(pool, digests)
    for column in columns:
        pool.release(column)
    taken = pool.allocate(1)
    assert set(taken) < set(columns[0])
    assert (pool.num_free, pool.num_cached) == (5, 4)
    assert resumed(pool, digests) == ([], [])
    pool.release(blocks)


def test_a_cached_column_gives_way_to_a_held_one_and_a_held_one_does_not() -> None:
    pool, digests = new_pool(12), chain(1, 1)
    blocks, [first] = computed(pool, digests)
    second = tuple(pool.allocate(M))
    pool.publish_entry(1, second, digests, 1)
    assert pool.match_entries(1, digests) == [first]
    for _ in range(2):
        pool.release(first)
    pool.publish_entry(1, second, digests, 1)
    assert pool.match_entries(1, digests) == [second]
    assert pool.num_cached == 0
    for held in (blocks, second, second):
        pool.release(held)
    assert (pool.num_used, pool.num_cached) == (0, 1 + M)


def test_columns_that_proved_wrong_are_not_found_again_held_or_not() -> None:
    pool, digests = new_pool(20), chain(1, 3)
    blocks, columns = computed(pool, digests)
    pool.release(columns[0])
    pool.withdraw([*blocks, *columns[1], *columns[2]], digests)
    for held in (blocks, *columns[1:]):
        pool.release(held)
    assert (pool.num_used, pool.num_cached) == (0, 0)
    assert pool.drain_events() == ([], [])


def test_a_block_is_told_while_a_hit_may_end_at_it_or_behind_it() -> None:
    pool, digests = new_pool(20), chain(1, 4)
    _, columns = computed(pool, digests)
    assert pool.drain_events() == (digests, [])
    lose(pool, columns[0])
    lose(pool, columns[1])
    assert pool.drain_events() == ([], [])
    lose(pool, columns[3])
    assert pool.drain_events() == ([], digests[3:])
    lose(pool, columns[2])
    assert pool.drain_events() == ([], [digests[2], digests[1], digests[0]])
    assert pool.cached_digests() == []


def test_with_a_window_of_one_position_a_hit_needs_no_column() -> None:
    pool, digests = (
        BlockPool(num_blocks=20, block_size=4, groups=groups_with(4, window=1, window_blocks=M)),
        chain(1, 3),
    )
    blocks, columns = computed(pool, digests)
    assert pool.drain_events() == (digests, [])
    for column in columns:
        lose(pool, column)
    assert resumed(pool, digests) == (blocks, [])
    assert (pool.drain_events(), pool.cached_digests()) == (([], []), digests)


class Counting(Sequence[bytes]):
    """Digests that count how often one is looked at."""

    def __init__(self, digests: list[bytes]) -> None:
        self.digests = digests
        self.looks = 0

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        self.looks += 1
        return self.digests[at]


def test_a_long_sequence_costs_the_same_for_each_block() -> None:
    came, went = list[bytes](), list[bytes]()
    usable, digests = ResumablePrefixes(came.append, went.append), Counting([])
    for number in range(1000):
        digests.digests.append(number.to_bytes(16, "little"))
        usable.add(digests, number + 1)
    assert digests.looks < 8_000
    for digest in digests.digests[:900]:
        usable.remove(digest)
    assert (came, went) == (digests.digests, [])
    for digest in digests.digests[900:]:
        usable.remove(digest)
    assert went == digests.digests[::-1]


class ColumnsMachine(Holders):
    """Random sequences against a model that remembers what was published in which block since it was taken, and who holds it."""

    def __init__(self) -> None:
        super().__init__(new_pool(20))
        self.tokens: dict[bytes, int] = {}
        self.columns: dict[bytes, tuple[int, ...]] = {}

    @rule(branch=st.integers(1, 2), length=st.integers(1, 5), released=st.booleans())
    def run(self, branch: int, length: int, released: bool) -> None:
        """A sequence finds what it can, and computes the rest; at times it lets go of what no window sees."""
        digests = chain(branch, length)
        blocks = self._match(digests)
        for at in range(len(blocks), length):
            try:
                fresh = self._allocate(1 + M)
            except OutOfBlocksError:
                return
            self._publish(fresh[0], tuple(fresh[1:]), digests[: at + 1])
            if released and at >= SEEN:
                self.pool.release(self.holds.pop(0))

    def _match(self, digests: list[bytes]) -> list[int]:
        blocks, columns = resumed(self.pool, digests)
        usable = [
            count
            for count in range(1, len(digests) + 1)
            if all(digest in self.tokens for digest in digests[:count])
            and all(digest in self.columns for digest in digests[max(0, count - SEEN) : count])
        ]
        count = max(usable, default=0)
        assert blocks == [self.tokens[digest] for digest in digests[:count]]
        assert columns == [self.columns[digest] for digest in digests[max(0, count - SEEN) : count]]
        self.holds += [blocks, *map(list, columns)]
        return blocks

    def _allocate(self, count: int) -> list[int]:
        free = 20 - len(self.in_use)
        assert self.pool.num_free == free
        if count > free:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            raise OutOfBlocksError
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not self.in_use & set(blocks), "a referenced block was given away"
        self.tokens = {digest: block for digest, block in self.tokens.items() if block not in blocks}
        self.columns = {digest: column for digest, column in self.columns.items() if not set(column) & set(blocks)}
        return blocks

    def _publish(self, block: int, column: tuple[int, ...], digests: list[bytes]) -> None:
        self.holds += [[block], list(column)]
        self.pool.publish(block, digests[-1])
        if self.tokens.get(digests[-1]) not in self.in_use:
            self.tokens[digests[-1]] = block
        self.pool.publish_entry(1, column, digests, len(digests))
        if not self.in_use & set(self.columns.get(digests[-1], ())):
            self.columns[digests[-1]] = column

    @rule(count=st.integers(1, 6))
    def squeeze(self, count: int) -> None:
        """Others need blocks for a moment."""
        try:
            self.pool.release(self._allocate(count))
        except OutOfBlocksError:
            return

    @precondition(lambda self: self.holds)
    @rule(number=st.integers(0, 30), branch=st.integers(1, 2))
    def withdraw(self, number: int, branch: int) -> None:
        hold, digests = self.holds[number % len(self.holds)], chain(branch, 5)
        self.pool.withdraw(hold, digests)
        self.tokens = {digest: block for digest, block in self.tokens.items() if block not in hold}
        self.columns = {
            digest: column
            for digest, column in self.columns.items()
            if not set(column) & set(hold) and digest not in digests
        }

    @invariant()
    def what_nobody_holds_is_cached_or_free(self) -> None:
        pool = self.pool
        kept = {*self.tokens.values(), *(block for column in self.columns.values() for block in column)}
        assert pool.num_cached == len(kept - self.in_use)
        assert len({*pool._free, *pool.retention, *self.in_use}) == 20

    @invariant()
    def what_leads_to_a_column_is_told(self) -> None:
        leading = {
            digest
            for branch in (1, 2)
            for at, digest in enumerate(chain(branch, 5))
            if any(behind in self.columns for behind in chain(branch, 5)[at:])
        }
        assert set(self.pool.cached_digests()) == leading & self.tokens.keys()


TestColumnsMachine = ColumnsMachine.TestCase
TestColumnsMachine.settings = examples(25, stateful_step_count=40)
