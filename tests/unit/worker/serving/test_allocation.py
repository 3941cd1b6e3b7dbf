"""Blocks go back to the pool once, and never while a pass in flight may touch them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool
from engine.sequence import Sequence
from tests.unit.engine.generate import new_sequence
from worker.serving.allocation import HeldBlocks, admit

BLOCK, NUM_BLOCKS = 4, 16


def held(pool: BlockPool, name: str = "a", *, tokens: int = 6) -> Sequence:
    sequence = new_sequence(name, [ord(name[0])] * tokens)
    admit(pool, sequence, num_tokens=tokens)
    return sequence


def test_a_sequence_that_no_pass_has_gives_its_blocks_back_at_once() -> None:
    pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    blocks, sequence = HeldBlocks(pool), held(pool)
    blocks.give_back(sequence)
    assert (pool.num_used, sequence.block_table, sequence.num_computed, blocks.awaited) == (0, [], 0, 0)


@pytest.mark.parametrize("passes", [1, 2])
def test_blocks_that_passes_may_touch_go_back_with_the_last_of_them(passes: int) -> None:
    pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    blocks, sequence = HeldBlocks(pool), held(pool)
    for _ in range(passes):
        blocks.launched(sequence)
    blocks.give_back(sequence)
    for _ in range(passes):
        assert (pool.num_used, blocks.leaving) == (2, [sequence])
        blocks.landed(sequence)
    assert (pool.num_used, blocks.awaited, blocks.in_use(sequence)) == (0, 0, False)


def test_a_pass_that_is_over_takes_nothing_from_a_sequence_that_goes_on() -> None:
    pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    blocks, sequence = HeldBlocks(pool), held(pool)
    blocks.launched(sequence)
    blocks.landed(sequence)
    assert (pool.num_used, blocks.in_use(sequence)) == (2, False)


@given(st.lists(st.tuples(st.sampled_from(["launch", "land", "give back"]), st.integers(0, 3)), max_size=40))
def test_whatever_happens_no_block_is_free_while_a_pass_has_it_and_none_is_lost(steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    blocks, sequences = HeldBlocks(pool), [held(pool, name) for name in "abcd"]
    tables = [list(sequence.block_table) for sequence in sequences]
    flying, given_back = [0] * 4, [False] * 4
    for what, which in steps:
        sequence = sequences[which]
        if what == "launch" and not given_back[which]:
            blocks.launched(sequence)
            flying[which] += 1
        elif what == "land" and flying[which]:
            blocks.landed(sequence)
            flying[which] -= 1
        elif what == "give back" and not given_back[which]:
            blocks.give_back(sequence)
            given_back[which] = True
        holding = [bool(flying[index]) or not given_back[index] for index in range(4)]
        assert [sequence.block_table for sequence in sequences] == [
            table if holds else [] for table, holds in zip(tables, holding, strict=True)
        ]
        assert pool.num_used == 2 * sum(holding)
        assert blocks.awaited == sum(given_back[index] and bool(flying[index]) for index in range(4))
