"""Real attention over a pool that is much smaller than what is asked for again: the tier finds it, and no text changes."""

from __future__ import annotations

import pytest

from common.blocks import hash_blocks
from engine.cache import memory
from engine.engine import Engine
from tests.unit.worker.tier.serving import BLOCK, LENGTH, NUM_PROMPTS, Server, ask, of_few_kinds
from worker.heartbeat import IndexNews
from worker.serving.allocation import withdraw


def test_what_the_pool_evicted_is_found_again_and_gives_the_same_text(engine: Engine, cold: list[list[int]]) -> None:
    server = Server(engine)
    for _ in range(3):
        answers = [server.answer(number) for number in range(NUM_PROMPTS)]
        assert [answer for answer, _ in answers] == cold
    assert {found for _, found in answers} == {LENGTH // BLOCK * BLOCK}
    totals = server.tier.totals()
    assert totals.hit_tokens > 0
    assert totals.bad_digests == 0


class Heard:
    """A reader of KV events about one tier."""

    def __init__(self) -> None:
        self.here = set[bytes]()

    def came(self, digest: bytes) -> None:
        self.here.add(digest)

    def went(self, digest: bytes) -> None:
        self.here.discard(digest)


@of_few_kinds
def test_the_index_hears_of_what_is_found(engine: Engine) -> None:
    """A prefix of several groups is found with all that the next token reads. Readers of events hear the same."""
    server, index, founds = Server(engine), set[bytes](), list[int]()
    news, heard = IndexNews(server.pool, server.tier), Heard()
    (gate,) = server.tier.prefixes.gates
    gate.told = heard
    for number in [*range(NUM_PROMPTS), *range(NUM_PROMPTS)]:
        added, removed = news.next()
        index = (index | {*added}) - {*removed}
        news.told()
        sequence = ask(number)
        digests = hash_blocks(sequence.hash_root, sequence.token_ids, BLOCK)
        told = next((at for at, digest in enumerate(digests) if digest not in index), len(digests))
        founds.append(server.answer(number)[1])
        assert founds[-1] == told * BLOCK
        assert heard.here == {digest for digest in server.tier.blocks if server.tier.resumes(digest)}
    assert founds[NUM_PROMPTS:] == [LENGTH // BLOCK * BLOCK] * NUM_PROMPTS
    for digest in [*server.tier.blocks]:
        server.tier.blocks.forget(digest)
    assert (heard.here, {*server.tier.prefixes}) == (set(), set())


@of_few_kinds
def test_what_host_memory_has_is_found_after_a_sleep(engine: Engine, cold: list[list[int]]) -> None:
    """The pool forgets all and its memory is given back, as `Parking` does on a CPU; one copy is under way then."""
    server = Server(engine)
    assert [server.answer(number)[0] for number in range(NUM_PROMPTS)] == cold
    server.tier.store_ahead()
    server.pool.clear()
    memory.give_back(engine.kv)
    memory.take_again(engine.kv)
    engine.kv.zero_()  # pages that it shares with others are not given back
    again = [server.answer(number) for number in range(NUM_PROMPTS)]
    assert [tokens for tokens, _ in again] == cold
    assert any(found for _, found in again)
    assert server.tier.totals().bad_digests == 0


@of_few_kinds
def test_a_flipped_bit_in_host_memory_is_a_miss(engine: Engine, cold: list[list[int]]) -> None:
    server = Server(engine)
    assert [server.answer(number)[0] for number in range(NUM_PROMPTS)] == cold
    server.flip_a_bit_of_each_slot()
    assert server.answer(0) == (cold[0], 0)
    assert server.tier.totals().bad_digests > 0
    assert server.tier.totals().hit_tokens == 0


@of_few_kinds
def test_what_proved_wrong_is_in_no_tier(engine: Engine, cold: list[list[int]]) -> None:
    server = Server(engine)
    for number in range(NUM_PROMPTS):
        server.answer(number)
    sequence = ask(0)
    while server.tier.is_loading(sequence, has_room=lambda: True):
        server.copier.land()
    server.generator.admit(sequence)
    server.generator.go_on([sequence], num_tokens=1)
    withdraw(server.pool, sequence)
    server.generator.release(sequence)
    server.tier.left(sequence)
    assert server.answer(0) == (cold[0], 0)


@of_few_kinds
def test_a_small_tier_stores_what_is_seen_again(engine: Engine, cold: list[list[int]]) -> None:
    server = Server(engine, slots_of_pool=1)
    assert [server.answer(number)[0] for number in range(NUM_PROMPTS)] == cold
    once = server.tier.totals().stored_blocks
    assert server.tier.totals().evicted_blocks == 0  # nothing gives way to what is seen once
    for _ in range(2):
        assert [server.answer(number)[0] for number in range(NUM_PROMPTS)] == cold
    assert server.tier.totals().stored_blocks > once
    assert server.tier.totals().hit_tokens > 0


@of_few_kinds
@pytest.mark.parametrize("after", ["copied", "read"])
def test_a_block_that_is_evicted_before_its_copy_landed_is_not_stored(engine: Engine, after: str) -> None:
    server = Server(engine)
    sequence = ask(0)
    assert not server.tier.is_loading(sequence, has_room=lambda: True)
    server.generator.run([sequence])
    held = server.pool.allocate(server.pool.num_empty)
    server.tier.store_ahead()
    assert server.copier.waiting
    if after == "copied":
        copy, over = server.copier.waiting.popleft()
        copied = copy()
        server.copier.waiting.appendleft((lambda: copied, over))
    held += server.pool.allocate(server.pool.num_free)  # now full of NaN
    server.copier.land()
    assert server.tier.totals().stored_blocks == 0
    assert server.tier.totals().lost_blocks > 0
    assert server.tier.totals().used_bytes == 0
    server.pool.release(held)


@of_few_kinds
def test_a_prompt_that_leaves_while_it_is_loaded_holds_nothing(engine: Engine, cold: list[list[int]]) -> None:
    server = Server(engine)
    for number in range(NUM_PROMPTS):
        server.answer(number)
    sequence = ask(0)
    assert server.tier.is_loading(sequence, has_room=lambda: True)
    assert server.pool.num_used > 0
    server.tier.left(sequence)
    server.copier.land()
    assert server.pool.num_used == 0
    assert server.answer(0)[0] == cold[0]


@of_few_kinds
def test_a_load_that_takes_too_long_is_a_miss_and_keeps_its_blocks_until_it_lands(
    engine: Engine, cold: list[list[int]]
) -> None:
    server = Server(engine)
    for number in range(NUM_PROMPTS):
        server.answer(number)
    late, other = ask(0), ask(1)
    assert server.tier.is_loading(late, has_room=lambda: True)
    written = server.tier.held
    server.copier.delay()
    assert server.woken
    assert not server.tier.loads(late)
    assert not server.tier.is_loading(late, has_room=lambda: True)
    assert not server.tier.is_loading(other, has_room=lambda: True)  # it would stand behind
    server.tier.left(late)
    assert server.tier.held == written
    assert server.pool.num_used == len(written)
    assert server.tier.totals().failed_copies == 1
    server.copier.land()
    assert server.pool.num_used == 0
    assert [server.answer(number)[0] for number in range(NUM_PROMPTS)] == cold
    assert server.tier.totals().failed_copies == 1


@of_few_kinds
def test_a_load_that_fails_is_a_miss(engine: Engine, cold: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(engine)
    for number in range(NUM_PROMPTS):
        server.answer(number)
    monkeypatch.setattr(server.memory, "load", _no_memory)
    assert server.answer(0) == (cold[0], 0)
    assert server.tier.totals().failed_copies == 1


@of_few_kinds
def test_nothing_is_stored_behind_a_copy_that_takes_too_long(engine: Engine, cold: list[list[int]]) -> None:
    server = Server(engine)
    for number in range(2):
        server.answer(number)
    sequence = ask(2)
    assert not server.tier.is_loading(sequence, has_room=lambda: True)
    server.generator.run([sequence])
    server.tier.store_ahead()
    server.copier.delay()
    server.tier.store_ahead()
    assert len(server.copier.waiting) == 1
    server.copier.land()
    assert [server.answer(number)[0] for number in range(NUM_PROMPTS)] == cold
    assert server.pool.num_used == 0


@of_few_kinds
def test_prompts_that_begin_alike_wait_for_one_load(engine: Engine, cold: list[list[int]]) -> None:
    server = Server(engine)
    for number in range(NUM_PROMPTS):
        server.answer(number)
    choices = [ask(0) for _ in range(3)]
    loaded = server.tier.totals().loaded_blocks
    assert all(server.tier.is_loading(choice, has_room=lambda: True) for choice in choices)
    assert len(server.copier.waiting) == 1
    wanted = len({*server.tier.held})
    server.copier.land()
    assert not any(server.tier.is_loading(choice, has_room=lambda: True) for choice in choices)
    assert server.tier.totals().loaded_blocks - loaded <= wanted
    for choice in choices:
        server.tier.left(choice)
    assert server.answer(0) == (cold[0], LENGTH // BLOCK * BLOCK)


@of_few_kinds
def test_who_waits_for_anothers_load_that_fails_goes_on_alone(engine: Engine, cold: list[list[int]]) -> None:
    server = Server(engine)
    for number in range(NUM_PROMPTS):
        server.answer(number)
    first, second = ask(0), ask(0)
    assert server.tier.is_loading(first, has_room=lambda: True)
    assert server.tier.is_loading(second, has_room=lambda: True)
    server.tier.left(first)
    server.copier.delay()
    assert not server.tier.is_loading(second, has_room=lambda: True)
    server.copier.land()
    server.tier.left(second)
    assert server.answer(0)[0] == cold[0]
    assert server.pool.num_used == 0


@of_few_kinds
def test_without_room_nothing_is_loaded(engine: Engine) -> None:
    server = Server(engine)
    for number in range(NUM_PROMPTS):
        server.answer(number)
    assert not server.tier.is_loading(ask(0), has_room=lambda: False)
    held = server.pool.allocate(server.pool.num_free)
    assert not server.tier.is_loading(ask(0), has_room=lambda: True)
    assert not server.copier.waiting
    server.pool.release(held)


@of_few_kinds
def test_where_no_prompt_is_computed_nothing_is_stored(engine: Engine) -> None:
    server = Server(engine)
    server.generator.run([ask(0)])
    held = server.pool.allocate(server.pool.num_empty)
    server.tier.store_ahead()
    assert not server.copier.waiting
    server.pool.release(held)


@of_few_kinds
def test_without_host_memory_the_pool_goes_on_alone(
    engine: Engine, cold: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(engine)
    monkeypatch.setattr(server.memory, "fill", _no_memory)
    for _ in range(2):
        assert [server.answer(number)[0] for number in range(NUM_PROMPTS)] == cold
    assert server.tier.totals().stored_blocks == server.tier.totals().used_bytes == 0


def _no_memory(*_: object) -> bytes:
    raise MemoryError("none left")
