"""Whose turn it is: small ones that keep coming go past who waits for many blocks, but not for ever."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool, OutOfBlocksError
from tests.examples import examples
from worker.serving.turns import MOST_PASSED, Turns


class Crowd:
    """Comers of a pool. Each takes its blocks if there is room beside what is kept from it, else it asks again."""

    def __init__(self, num_blocks: int) -> None:
        self.pool, self.turns = BlockPool(num_blocks=num_blocks, block_size=4), Turns()
        self.wanted: dict[int, int] = {}  # blocks, by who waits, in order of arrival
        self.held: list[list[int]] = []
        self.passed: Counter[int] = Counter()  # by others that left too little for it

    def ask(self, who: int, blocks: int) -> bool:
        try:
            self.held.append(self.pool.allocate(blocks, spare=self.turns.kept_from(who)))
        except OutOfBlocksError:
            self.wanted[who] = blocks
            self.turns.waits(who, blocks=blocks)
            return False
        self.turns.admitted(who)
        self.wanted.pop(who, None)
        for other, theirs in self.wanted.items():
            self.passed[other] += other < who and theirs > self.pool.num_free
        return True

    def leave(self, who: int) -> None:
        self.turns.leaves(who)
        del self.wanted[who]


@examples(40)
@given(
    seed=st.integers(0, 2**32), num_blocks=st.integers(2, 40), share=st.floats(0.0, 0.5), patience=st.floats(0.9, 1.0)
)
def test_nobody_is_passed_more_often_than_the_most(seed: int, num_blocks: int, share: float, patience: float) -> None:
    """In any order of comers, questions and ends; and whoever waits is admitted once the others have ended."""
    dice, crowd = random.Random(seed), Crowd(num_blocks)
    for who in range(200):
        large = dice.random() < share
        crowd.ask(who, dice.randint(1, num_blocks if large else 1 + num_blocks // 8))
        for waiting in dice.sample(list(crowd.wanted), k=min(2, len(crowd.wanted))):
            if dice.random() > patience:
                crowd.leave(waiting)
            else:
                crowd.ask(waiting, crowd.wanted[waiting])
        while crowd.held and dice.random() < 0.5:
            crowd.pool.release(crowd.held.pop(dice.randrange(len(crowd.held))))
    assert max(crowd.passed.values(), default=0) <= MOST_PASSED

    while crowd.wanted:
        for held in crowd.held:
            crowd.pool.release(held)
        crowd.held = []
        assert any(crowd.ask(who, blocks) for who, blocks in list(crowd.wanted.items())), "each waits for another"


def test_an_endless_stream_of_small_ones_lets_a_large_one_in() -> None:
    """Two at a time leave room for one more small one each time that one ends, and never for the large one."""
    crowd = Crowd(8)
    for small in range(3):
        crowd.ask(small, 2)
    assert not crowd.ask(3, 7)
    small = 3
    while not crowd.ask(3, 7):
        small += 1
        assert small < 100, "it waits as long as they come"
        crowd.ask(small, 2)
        crowd.pool.release(crowd.held.pop(0))
    assert crowd.passed[3] == MOST_PASSED


def waiting(*needs: int) -> tuple[Turns, list[str]]:
    """So many wait, called a, b and so on, and were passed as often as they may be; and what the pool was told."""
    told: list[str] = []
    turns = Turns(changed=lambda: told.append("changed"))
    for name, blocks in zip("abc", needs, strict=False):
        turns.waits(name, blocks=blocks)
    for small in range(MOST_PASSED):
        assert turns.kept_from("later") == 0
        turns.admitted(f"small {small}")
    assert not told
    return turns, told


def test_what_is_kept_is_kept_from_those_who_came_later() -> None:
    turns, _ = waiting(5, 3)
    assert turns.due == ["a", "b"]
    assert [turns.kept_from(who) for who in ("a", "b", "later")] == [0, 5, 8]
    turns.waits("a", blocks=6)
    assert turns.kept_from("later") == 9


@pytest.mark.parametrize("how", ["admitted", "left", "asks no more"])
def test_nothing_is_kept_for_who_waits_no_more(how: str) -> None:
    turns, told = waiting(5)
    if how == "admitted":
        assert turns.admitted("a") == MOST_PASSED
    elif how == "left":
        turns.leaves("a")
    else:
        turns.still_waits("a", until=7.0)
        turns.look_after(6.9)
        assert (turns.due, told) == (["a"], [])
        turns.look_after(7.1)
    assert (turns.due, turns.kept_from("later"), told) == ([], 0, ["changed"])


def test_earlier_waits_count() -> None:
    turns = Turns()
    turns.waits("again", blocks=4, passed=MOST_PASSED)
    assert turns.due == ["again"]


def test_who_came_first_passes_nobody() -> None:
    turns = Turns()
    for name in "ab":
        turns.waits(name, blocks=4)
    turns.admitted("a")
    assert turns.admitted("b") == 0
