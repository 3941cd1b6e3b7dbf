"""Blocks go back to the pool once, and never while a pass in flight may touch them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.blocks import hash_blocks
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.groups import entries_of
from engine.sequence import Sequence
from tests.unit.engine.generate import ROOT, new_sequence
from tests.unit.engine.tables import groups_with
from worker.serving.allocation import HeldBlocks, admit, blocks_of, cargo_of, publish_computed, received, withdraw
from worker.serving.chunks import schedule

BLOCK, NUM_BLOCKS = 4, 16
STATE = 2  # blocks of a state: a checkpoint each 16 tokens
GROUPS = groups_with(BLOCK, state_blocks=STATE)


def held(pool: BlockPool, name: str = "a", *, tokens: int = 6) -> Sequence:
    sequence = new_sequence(name, [ord(name[0])] * tokens)
    admit(pool, sequence, num_tokens=tokens)
    return sequence


def test_a_sequence_that_no_pass_has_gives_its_blocks_back_at_once() -> None:
    pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    blocks, sequence = HeldBlocks(pool), held(pool)
    blocks.give_back(sequence)
    assert (pool.num_used, sequence.tables, sequence.num_computed, blocks.awaited) == (0, [], 0, 0)


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


def test_what_a_sequence_finds_again_of_its_own_is_no_hit() -> None:
    pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK)
    blocks, first = HeldBlocks(pool), held(pool, tokens=9)
    first.num_computed = 9
    publish_computed(pool, first)
    assert first.num_found == 0
    blocks.give_back(first)
    admit(pool, first, num_tokens=9)
    assert (first.num_cached, first.num_found) == (8, 0)
    second = held(pool, tokens=9)  # another one with the same beginning
    assert (second.num_cached, second.num_found) == (8, 8)


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
    tables = [blocks_of(sequence) for sequence in sequences]
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
        assert [blocks_of(sequence) for sequence in sequences] == [
            table if holds else [] for table, holds in zip(tables, holding, strict=True)
        ]
        assert pool.num_used == 2 * sum(holding)
        assert blocks.awaited == sum(given_back[index] and bool(flying[index]) for index in range(4))


def runs(sequence: Sequence) -> list[tuple[int, int]]:
    """Where each state that a sequence holds stands among its entries."""
    ends = [at + 1 for at, _ in sequence.tables[1].own()]
    return list(pairwise([sequence.tables[1].num_gone, *ends]))


def compute(pool: BlockPool, sequence: Sequence, *chunks: int, spare: int = 0) -> None:
    """Passes of so many tokens each."""
    for num_tokens in chunks:
        chunk = schedule(pool, sequence, num_tokens, spare=spare)
        sequence.finish(chunk)
        publish_computed(pool, sequence)
        if chunk.sample:
            sequence.append(1)


def admitted(pool: BlockPool, prompt: list[int], *, spare: int = 0) -> Sequence:
    sequence = new_sequence("a", prompt)
    admit(pool, sequence, num_tokens=len(prompt) + 8, spare=spare)
    return sequence


def whole(pool: BlockPool, prompt: list[int], *chunks: int) -> Sequence:
    """Compute a prompt and give its blocks back."""
    sequence = admitted(pool, prompt)
    compute(pool, sequence, *(chunks or [sequence.num_unscheduled]))
    HeldBlocks(pool).give_back(sequence)
    return sequence


def lengths(pool: BlockPool, prompt: list[int]) -> list[int]:
    """How many of the prompt's blocks are in front of each checkpoint."""
    digests = hash_blocks(ROOT, prompt, BLOCK)
    return sorted(digests.index(digest) + 1 for digest in pool._entries[1])


def test_a_prompt_leaves_checkpoints_on_the_way_and_behind_its_last_full_block() -> None:
    pool = BlockPool(num_blocks=64, block_size=BLOCK, groups=GROUPS)
    prompt = list(range(40))
    sequence = admitted(pool, prompt)
    begun = pool.num_used
    assert begun == 12 + STATE
    chunk = schedule(pool, sequence, 40)
    assert runs(sequence) == [(0, 4), (4, 8), (8, 9), (9, 12)]
    assert pool.num_used == begun + 3 * STATE
    sequence.finish(chunk)
    publish_computed(pool, sequence)
    assert (runs(sequence), sequence.tables[1].begin) == ([(9, 12)], 36)  # the others stay while there is room
    assert (pool.num_used, pool.num_cached) == (begun, 3 * STATE)
    HeldBlocks(pool).give_back(sequence)
    for length, cached in ((40, 36), (36, 32), (20, 16), (16, 0)):
        again = admitted(pool, prompt[:length])
        assert again.num_computed == again.num_cached == cached
        found, num_entries = cached // BLOCK, len(again.tables[0].entries)
        assert runs(again) == [*([(found - 1, found)] if found else []), (found, num_entries)]
        assert (again.tables[1].num_shared, again.tables[1].begin) == (found, cached)
        HeldBlocks(pool).give_back(again)
    assert pool.num_used == 0


@pytest.mark.parametrize("chunks", [[40], [13, 27], [16, 16, 8], [36, 4], [1] * 40])
def test_however_a_prompt_is_cut_its_checkpoints_are_the_same(chunks: list[int]) -> None:
    pool = BlockPool(num_blocks=64, block_size=BLOCK, groups=GROUPS)
    whole(pool, list(range(40)), *chunks)
    assert lengths(pool, list(range(40))) == [4, 8, 9]


def test_who_branches_leaves_a_checkpoint_for_the_next() -> None:
    pool = BlockPool(num_blocks=64, block_size=BLOCK, groups=GROUPS)
    stem = list(range(14))
    cached = [whole(pool, [*stem, *[number] * 9]).num_cached for number in (50, 60, 70)]
    assert cached == [0, 0, 12]


def test_without_room_a_sequence_goes_on_in_the_same_state() -> None:
    pool = BlockPool(num_blocks=12 + 2 * STATE, block_size=BLOCK, groups=GROUPS)
    sequence = admitted(pool, list(range(40)))
    compute(pool, sequence, 20, 20, spare=1)
    assert runs(sequence) == [(0, 12)]
    HeldBlocks(pool).give_back(sequence)
    assert pool.cached_digests() == []


def test_without_room_for_its_own_state_a_sequence_goes_on_in_the_checkpoint() -> None:
    pool = BlockPool(num_blocks=12 + 2 * STATE - 1, block_size=BLOCK, groups=GROUPS)
    whole(pool, list(range(20)))
    assert admitted(pool, list(range(20))).num_cached == 16
    assert pool.num_used == 7 + 2 * STATE
    pool = BlockPool(num_blocks=12 + 2 * STATE - 1, block_size=BLOCK, groups=GROUPS)
    whole(pool, list(range(20)))
    long = admitted(pool, list(range(40)))
    assert (long.num_cached, runs(long), long.tables[1].begin) == (16, [(3, 12)], 15)
    assert pool.num_used == 12 + STATE
    assert pool._entries[1] == {}  # nobody finds what changes now
    HeldBlocks(pool).give_back(long)
    assert pool.num_used == 0


def test_a_checkpoint_that_others_hold_is_not_taken_over() -> None:
    pool = BlockPool(num_blocks=12 + 3 * STATE, block_size=BLOCK, groups=GROUPS)
    whole(pool, list(range(20)))
    admitted(pool, list(range(20)))
    with pytest.raises(OutOfBlocksError):
        admitted(pool, list(range(40)))
    (checkpoint,) = pool._entries[1].values()
    assert pool.num_used == 7 + 2 * STATE
    assert all(pool._references[block] == 1 for block in checkpoint)


class Watcher:
    """A lower tier that notes the blocks of which it hears that it may store them."""

    def __init__(self) -> None:
        self.heard = set[bytes]()

    def cached(self, digest: bytes) -> None:
        self.heard.add(digest)

    def forgotten(self, digest: bytes) -> None: ...

    def withdrawn(self, digest: bytes) -> None: ...


def test_a_generation_from_elsewhere_keeps_the_newest_end_of_its_blocks() -> None:
    """The state that came is the first of them, and free once the next one is shared. A lower tier hears of the last alone."""
    pool, watcher = BlockPool(num_blocks=64, block_size=BLOCK, groups=GROUPS), Watcher()
    pool.watcher = watcher
    sequence = new_sequence("a", list(range(16)), max_tokens=40)
    state = tuple(pool.allocate(STATE))
    entries = [entries_of(pool.allocate(14), 1), [state]]
    sequence.tables = received(pool, cargo_of(pool, 16), entries, [0, 0])
    sequence.restart(16)
    sequence.append(1)
    publish_computed(pool, sequence)
    compute(pool, sequence, 1)
    assert (pool._entries[1], runs(sequence)) == ({sequence.digests[3]: state}, [(4, 14)])
    compute(pool, sequence, *[1] * 16)
    assert (runs(sequence), sequence.tables[1].begin) == ([(8, 14)], 32)
    assert lengths(pool, sequence.token_ids) == [7, 8]  # the newest, and the regular one
    assert pool.num_cached == 2 * STATE
    assert watcher.heard == {sequence.digests[7]}
    digests = sequence.digests
    HeldBlocks(pool).give_back(sequence)
    assert watcher.heard == set(digests)


@pytest.mark.parametrize("chunks", [[60], [16, 44], [1] * 60])
def test_a_prompt_leaves_checkpoints_at_the_ends_of_its_first_and_newest_messages(chunks: list[int]) -> None:
    """As far from each other as they have to be, and never more than its blocks."""
    pool = BlockPool(num_blocks=128, block_size=BLOCK, groups=groups_with(BLOCK, state_blocks=4))
    prompt = list(range(60))
    sequence = new_sequence("a", prompt, stop_token_ids=[9, 20, 22, 30, 46, 57])
    admit(pool, sequence, num_tokens=len(prompt) + 8)
    assert sequence.branches == (8, 20, 28, 44, 56)
    compute(pool, sequence, *chunks)
    HeldBlocks(pool).give_back(sequence)
    assert lengths(pool, prompt) == [2, 5, 7, 8, 11, 14]  # with the regular one behind 32
    for length, cached in ((58, 56), (55, 44), (43, 32), (15, 8)):
        assert admitted(pool, [*prompt[:length], 99]).num_cached == cached


def test_states_that_proved_wrong_are_never_found_again() -> None:
    """Also those that the sequence gave back already."""
    pool = BlockPool(num_blocks=64, block_size=BLOCK, groups=GROUPS)
    sequence = admitted(pool, list(range(40)))
    compute(pool, sequence, 20, 20)
    withdraw(pool, sequence)
    HeldBlocks(pool).give_back(sequence)
    assert (pool.num_cached, pool.num_used, pool._entries[1]) == (0, 0, {})


def test_a_state_that_proved_wrong_for_another_is_not_published_again() -> None:
    pool = BlockPool(num_blocks=64, block_size=BLOCK, groups=GROUPS)
    whole(pool, list(range(40)))
    first, second = (admitted(pool, [*range(36), number, number]) for number in (50, 60))
    assert first.num_cached == second.num_cached == 36
    withdraw(pool, first)
    compute(pool, second, 2)
    assert pool._entries[1] == {}
