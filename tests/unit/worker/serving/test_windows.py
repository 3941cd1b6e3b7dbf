"""Sequences take windows' entries ahead of their passes and let go of what no window sees: never too early, none is lost."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pages import KVGroup, KVLayout
from common.words import Keeps
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool, OutOfBlocksError
from engine.cache.pages import blocks_of_a_sequence
from engine.groups import LEAST_AHEAD, State, Window
from engine.sequence import Chunk, Sequence
from engine.step.limits import wrong_tables
from kvtransfer.plan import pick
from tests.examples import examples
from tests.unit.decode.scheduling import make_request
from tests.unit.engine.generate import new_sequence
from tests.unit.engine.tables import groups_with
from worker.serving.allocation import (
    HeldBlocks,
    admit,
    admit_in_turn,
    blocks_of,
    cargo_of,
    cover,
    grow,
    longest_sequence,
    needs,
    publish_computed,
    withdraw,
)
from worker.serving.chunks import schedule
from worker.serving.turns import MOST_PASSED, Turns

BLOCK, M, WINDOW = 4, 2, 10
SEEN = 3  # entries that the first token of a block sees behind itself


def new_pool(num_blocks: int, *, window: int = WINDOW, window_blocks: int = M, state_blocks: int = 0) -> BlockPool:
    groups = groups_with(BLOCK, window=window, window_blocks=window_blocks, state_blocks=state_blocks)
    return BlockPool(num_blocks=num_blocks, block_size=BLOCK, groups=groups)


def scheduled(pool: BlockPool, sequence: Sequence, num_tokens: int) -> Chunk:
    """A pass of these tokens, which has all the entries that it needs."""
    chunk = schedule(pool, sequence, num_tokens)
    assert not wrong_tables(chunk, pool.groups)
    return chunk


def land(pool: BlockPool, chunk: Chunk) -> None:
    chunk.sequence.finish(chunk)
    publish_computed(pool, chunk.sequence)
    if chunk.sample:
        chunk.sequence.append(1)


def admitted(pool: BlockPool, prompt: list[int], *, ahead: int | None = None, max_tokens: int = 12) -> Sequence:
    sequence = new_sequence("a", prompt, max_tokens=max_tokens)
    admit(pool, sequence, num_tokens=len(prompt), ahead=ahead)
    return sequence


def compute(pool: BlockPool, sequence: Sequence, *chunks: int) -> None:
    for num_tokens in chunks:
        assert cover(pool, sequence, num_tokens) == num_tokens
        land(pool, scheduled(pool, sequence, num_tokens))


def decode(pool: BlockPool, sequence: Sequence, num_tokens: int) -> None:
    for _ in range(num_tokens):
        grow(pool, sequence, num_tokens=sequence.num_scheduled + 1)
        land(pool, scheduled(pool, sequence, 1))


def held(sequence: Sequence) -> list[int]:
    """The window's entries that are there."""
    return [at for at, _ in sequence.tables[1].own()]


def test_a_prompt_lets_go_between_chunks_and_decoding_at_a_blocks_end() -> None:
    pool = new_pool(100)
    sequence = admitted(pool, list(range(42)))
    assert held(sequence) == list(range(11))
    compute(pool, sequence, 9)
    assert held(sequence) == list(range(11))
    compute(pool, sequence, 11)
    assert held(sequence) == list(range(2, 11))  # the token at 20 sees 11 and what follows
    compute(pool, sequence, 22)
    assert held(sequence) == [7, 8, 9, 10]
    decode(pool, sequence, 1)
    assert held(sequence) == [7, 8, 9, 10]
    decode(pool, sequence, 1)  # the token at 43 fills the block
    assert held(sequence) == [8, 9, 10]
    assert (len(sequence.tables[0].entries), pool.num_used) == (11, 11 + 3 * M)
    HeldBlocks(pool).give_back(sequence)
    assert (pool.num_used, sequence.tables) == (0, [])


def test_a_prompt_has_the_entries_of_a_window_and_a_chunk_however_long_it_is() -> None:
    pool = new_pool(500)
    sequence = admitted(pool, list(range(4000, 4800)), ahead=16)
    most = SEEN + 2 + 4
    assert (len(sequence.tables[0].entries), len(sequence.tables[1].entries)) == (200, most)
    for _ in range(50):
        compute(pool, sequence, 16)
        assert len(held(sequence)) <= most
        assert pool.num_used <= 200 + most * M
    assert held(sequence) == [197, 198, 199]


def test_without_room_for_a_whole_chunk_a_part_of_it_is_computed() -> None:
    pool = new_pool(20 + 6 * M)
    sequence = admitted(pool, list(range(80)), ahead=64)
    assert len(sequence.tables[1].entries) == 6
    assert cover(pool, sequence, 64) == 24
    compute(pool, sequence, 24)
    assert cover(pool, sequence, 56) == 12
    while sequence.num_computed < 80:
        compute(pool, sequence, cover(pool, sequence, sequence.num_unscheduled))
    HeldBlocks(pool).give_back(sequence)
    assert pool.num_used == 0


def test_a_prompt_in_progress_shares_entries_as_they_go_and_waits_for_nobody() -> None:
    pool = new_pool(60)
    first = admitted(pool, list(range(80)), ahead=4)
    others = pool.allocate(60 - 20 - 6 * M)
    compute(pool, first, 24)
    assert held(first) == [3, 4, 5, 6, 7, 8]
    pool.release(others[: 14 * (1 + M)])
    second = admitted(pool, [*range(24), 99])
    assert second.num_cached == 0  # what went made room at once, and what is held is nobody else's yet
    while first.num_computed < 80:
        compute(pool, first, cover(pool, first, 80 - first.num_computed, spare=pool.num_free))
    assert admitted(pool, list(range(80)), ahead=4).num_cached == 76


def test_a_hit_that_would_leave_no_room_for_entries_of_its_own_is_not_taken() -> None:
    pool = new_pool(20 + (SEEN + 2) * M)
    assert longest_sequence(pool) == 80
    first = admitted(pool, list(range(40)))
    compute(pool, first, 40)
    HeldBlocks(pool).give_back(first)
    assert admitted(pool, list(range(30)), ahead=4).num_cached == 28
    pool = new_pool(20 + (SEEN + 2) * M)
    first = admitted(pool, list(range(40)))
    compute(pool, first, 40)
    HeldBlocks(pool).give_back(first)
    again = admitted(pool, list(range(80)), ahead=4)
    assert again.num_cached == 0
    while again.num_computed < 80:
        compute(pool, again, cover(pool, again, 80 - again.num_computed))


@pytest.mark.parametrize("in_batch", [False, True])
def test_who_found_entries_waits_for_more_than_is_free(in_batch: bool) -> None:
    """It needs those besides its own. Were less kept for it than it needs, others would go on passing it."""
    pool, turns = new_pool(480), Turns()
    scheduler = DecodeScheduler(pool=pool, max_sequences=2, max_model_len=1000, turns=turns)
    first = admitted(pool, [at % 97 for at in range(40)])
    compute(pool, first, 40)
    HeldBlocks(pool).give_back(first)
    pool.allocate(10)
    second = make_request("b", prompt=799, max_tokens=12)
    second.sequence.hash_root = first.hash_root
    assert pool.num_free > needs(pool, num_tokens=800, ahead=LEAST_AHEAD, spare=0)
    if in_batch:
        scheduler.enqueue(second)
        assert scheduler.plan(LEAST_AHEAD) == []
    else:
        assert not admit_in_turn(pool, turns, second.sequence, num_tokens=800, spare=0, ahead=LEAST_AHEAD)
    for small in range(MOST_PASSED):
        turns.admitted(small)
    assert turns.kept_from("later") > pool.num_free


def test_a_sequence_that_gave_way_is_found_again_up_to_its_last_full_block() -> None:
    for more in range(9):
        pool = new_pool(100)
        sequence = admitted(pool, list(range(30)), max_tokens=30)
        compute(pool, sequence, 30)
        decode(pool, sequence, more)
        HeldBlocks(pool).give_back(sequence)
        admit(pool, sequence, num_tokens=len(sequence.token_ids) + 1)
        assert sequence.num_cached == (30 + more) // BLOCK * BLOCK
        decode(pool, sequence, 0)
        compute(pool, sequence, sequence.num_unscheduled)


def test_who_computes_again_what_was_evicted_shares_it_again() -> None:
    pool = new_pool(100)
    sequence = admitted(pool, list(range(30)))
    compute(pool, sequence, 30)
    HeldBlocks(pool).give_back(sequence)
    pool.release(pool.allocate(pool.num_free))
    admit(pool, sequence, num_tokens=len(sequence.token_ids))
    assert sequence.num_cached == 0
    compute(pool, sequence, 30)
    HeldBlocks(pool).give_back(sequence)
    assert admitted(pool, list(range(30))).num_cached == 28


@pytest.mark.quick(first=10)
@pytest.mark.parametrize("num_blocks", range(14, 46))
def test_whatever_is_found_a_prompt_that_fits_alone_is_admitted_alone(num_blocks: int) -> None:
    """Else it would wait for blocks that nobody holds."""
    pool = new_pool(num_blocks)
    longest = longest_sequence(pool)
    for known in range(BLOCK, longest, BLOCK):
        first = admitted(pool, list(range(known + 1)), ahead=9)
        while first.num_computed <= known:
            compute(pool, first, cover(pool, first, first.num_unscheduled))
        HeldBlocks(pool).give_back(first)
        for num_tokens in range(known + 1, longest + 1, 3):
            second = admitted(pool, list(range(num_tokens)), ahead=9)
            HeldBlocks(pool).give_back(second)
        pool.release(pool.allocate(pool.num_free))


def test_what_proved_wrong_is_found_by_nobody_also_entries_that_went() -> None:
    pool = new_pool(100)
    sequence = admitted(pool, list(range(40)))
    compute(pool, sequence, 20, 20)
    withdraw(pool, sequence)
    HeldBlocks(pool).give_back(sequence)
    assert (pool.num_used, pool.num_cached) == (0, 0)


@given(
    num_blocks=st.integers(8, 60),
    window_blocks=st.integers(1, 4),
    window=st.integers(2, 30),
    max_chunk=st.integers(1, 40),
    depth=st.integers(1, 2),
)
@examples(60)
def test_the_longest_sequence_can_be_computed_alone(
    num_blocks: int, window_blocks: int, window: int, max_chunk: int, depth: int
) -> None:
    """Found or not: its prompt in chunks, then to the last token that fits, with passes in flight."""
    pool = new_pool(num_blocks, window=window, window_blocks=window_blocks)
    longest = longest_sequence(pool)
    for _ in range(2):
        sequence = new_sequence("a", list(range(max(1, longest // 2))), max_tokens=longest)
        admit(pool, sequence, num_tokens=len(sequence.token_ids) + 1, ahead=max_chunk)
        in_flight: deque[Chunk] = deque()
        while len(sequence.token_ids) < longest or in_flight:
            wanted = min(max_chunk, sequence.num_unscheduled) if sequence.num_tokens < longest else 0
            covered = cover(pool, sequence, wanted) if wanted > 1 else wanted
            try:
                if covered == 1:
                    grow(pool, sequence, num_tokens=sequence.num_scheduled + 1)
            except OutOfBlocksError:
                covered = 0
            if covered and len(in_flight) < depth:
                in_flight.append(scheduled(pool, sequence, covered))
            else:
                assert in_flight, "it waits for nobody"
                land(pool, in_flight.popleft())
        HeldBlocks(pool).give_back(sequence)
        assert pool.num_used == 0
    assert longest >= num_blocks // (1 + window_blocks) * BLOCK


@examples(40)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_interleaved_no_entry_is_lost_and_none_is_missed(seed: int) -> None:
    rng = random.Random(seed)
    pool = new_pool(
        rng.randint(20, 80),
        window=rng.randint(2, 20),
        window_blocks=rng.randint(1, 3),
        state_blocks=rng.choice([0, 0, 1, 2]),
    )
    blocks, running = HeldBlocks(pool), list[Sequence]()
    in_flight, all_of_them = deque[Chunk](), list[Sequence]()
    stems = [[rng.randrange(9) for _ in range(40)] for _ in range(2)]
    for _ in range(150):
        match rng.choice(["admit", "admit", "plan", "plan", "plan", "land", "land", "leave"]):
            case "admit" if len(running) < 5:
                prompt = [
                    *rng.choice(stems)[: rng.randint(0, 40)],
                    *[rng.randrange(9) for _ in range(rng.randint(1, 9))],
                ]
                sequence = new_sequence("a", prompt[: longest_sequence(pool)], max_tokens=99)
                num_tokens, ahead = len(sequence.token_ids), rng.randint(1, 30)
                try:
                    admit(pool, sequence, num_tokens=num_tokens, ahead=ahead, spare=rng.randint(0, 3))
                except OutOfBlocksError:
                    continue
                running.append(sequence)
                all_of_them.append(sequence)
            case "plan" if len(in_flight) < 2:
                for sequence in rng.sample(running, len(running)):
                    num_tokens = cover(pool, sequence, min(rng.randint(1, 30), sequence.num_unscheduled))
                    is_prompt = sequence.num_scheduled < sequence.num_prompt_tokens
                    assert num_tokens or not is_prompt or blocks.in_use(sequence), "a prompt waits for others"
                    try:
                        grow(pool, sequence, num_tokens=sequence.num_scheduled + num_tokens)
                    except OutOfBlocksError:
                        continue
                    if num_tokens and len(in_flight) < 4:
                        in_flight.append(scheduled(pool, sequence, num_tokens))
                        blocks.launched(sequence)
            case "land" if in_flight:
                chunk = in_flight.popleft()
                first = chunk.start // BLOCK
                assert (
                    all(pool._references[each] == 1 for each in chunk.sequence.tables[1].entries[first])
                    or chunk.start % BLOCK
                )
                blocks.landed(chunk.sequence)
                if chunk.sequence in running:
                    land(pool, chunk)
            case "leave" if running:
                sequence = running.pop(rng.randrange(len(running)))
                blocks.give_back(sequence)
        for chunk in in_flight:
            assert not wrong_tables(chunk, pool.groups), "a pass in flight lost an entry"
        references = [0] * pool.num_blocks
        for sequence in all_of_them:
            for block in blocks_of(sequence):
                references[block] += 1
        assert references == pool._references
    while in_flight:
        blocks.landed(in_flight.popleft().sequence)
    for sequence in running:
        blocks.give_back(sequence)
    assert pool.num_used == 0


def test_what_is_handed_over_is_what_the_next_token_needs() -> None:
    cargo = cargo_of(new_pool(50), 26)
    assert (cargo.num_blocks, [group.first for group in cargo.groups]) == (7, [0, 3])
    pushed = [(item.group, item.entry, item.number) for item in cargo.lacking([2, 0])]
    windows = [(1, at, number) for at in range(3, 7) for number in range(M)]
    tokens = [(0, at, 0) for at in range(2, 7)]
    assert pushed == sorted([*tokens, *windows], key=lambda item: (item[1], item[0], item[2]))
    assert [item.entry for item in cargo.lacking([6, 5])] == [5, 5, 6, 6, 6]
    assert cargo.lacking([7, 7]) == []


@given(
    num_tokens=st.integers(1, 60),
    state_blocks=st.integers(0, 2),
    window=st.integers(0, 40),
    firsts=st.lists(st.integers(0, 15), min_size=3, max_size=3),
)
def test_both_ends_number_the_blocks_alike(num_tokens: int, state_blocks: int, window: int, firsts: list[int]) -> None:
    """Blocks that are picked in this order are placed as they were, and pushed in the order in which they become final."""
    pool = new_pool(50, window=window, state_blocks=state_blocks)
    cargo = cargo_of(pool, num_tokens)
    begins = [min(first, cargo.num_blocks) for first in firsts[: len(pool.groups)]]
    lacking = cargo.lacking(begins)
    finals = [cargo.final_at(item) for item in lacking]
    assert finals == sorted(finals)
    assert len({*lacking}) == len(lacking)
    numbers = iter(range(10_000))
    tables = [
        [tuple(next(numbers) for _ in range(group.blocks)) for _ in range(cargo.num_blocks)] for group in pool.groups
    ]
    placed = cargo.place(lacking, pick(lacking, tables))
    oldest = [max(begin, part.first) for begin, part in zip(begins, cargo.groups, strict=True)]
    assert placed == [table[first:] for table, first in zip(tables, oldest, strict=True)]
    assert not state_blocks or cargo.groups[-1].first == cargo.num_blocks - 1


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 31, 32, 33])
def test_an_entry_goes_once_its_tokens_are_computed(num_tokens: int) -> None:
    cargo = cargo_of(new_pool(50, state_blocks=1), num_tokens)
    for item in cargo.lacking([0, 0, 0]):
        assert cargo.final_at(item) == min((item.entry + 1) * BLOCK, num_tokens)


@pytest.mark.parametrize("window_blocks", [0, 2])
@pytest.mark.parametrize("state_blocks", [0, 3])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 400])
def test_the_blocks_of_a_sequence_are_the_fewest_that_hold_it(
    window_blocks: int, state_blocks: int, num_tokens: int
) -> None:
    groups = groups_with(16, window=40 if window_blocks else 0, window_blocks=window_blocks, state_blocks=state_blocks)
    kinds = {Window: Keeps.WINDOW, State: Keeps.STATE}
    layout = msgspec.structs.replace(
        KVLayout(num_blocks=1, num_layers=1, block_size=16, num_kv_heads=1, head_dim=4, dtype="float32"),
        groups=tuple(
            KVGroup(keeps=kinds[type(group)], parts=(), blocks_per_entry=group.blocks, most_entries=group.most)
            for group in groups[1:]
        ),
    )
    fewest = blocks_of_a_sequence(layout, num_tokens)

    def longest_with(num_blocks: int) -> int:
        return longest_sequence(BlockPool(num_blocks=num_blocks, block_size=16, groups=groups))

    assert longest_with(fewest) >= num_tokens
    assert fewest == 1 or longest_with(fewest - 1) < num_tokens
