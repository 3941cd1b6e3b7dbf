"""Conversations played again turn by turn: of the tokens of earlier turns next to all are found, with states as without."""

from __future__ import annotations

import random

import pytest

from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from tests.unit.decode.scheduling import land, make_request, new_scheduler

END = 2  # of a message
ASKED = [3, 4, 5, 6, 7, 8, 9, 10, 11]  # a template's beginning of an answer; but for three tokens, of its thoughts
SYSTEM, USER, ANSWER = 300, 60, 40


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 1000) for _ in range(count)]


def _answered(
    scheduler: DecodeScheduler, pool: BlockPool, name: str, prompt: list[int], length: int
) -> tuple[int, list[int]]:
    """The tokens found of a prompt, and an answer of so many; it ends with a stop token."""
    rng, request = random.Random(name), make_request(name, prompt=len(prompt), max_tokens=length + 1)
    sequence = request.sequence
    sequence.token_ids[:] = prompt
    sequence.sampling.stop_token_ids.append(END)
    scheduler.enqueue(request)
    while not sequence.finish_reason():
        is_last = sequence.num_generated == length
        land(scheduler, pool, scheduler.plan(512), token=END if is_last else rng.randrange(10, 1000))
    return sequence.num_found or 0, sequence.token_ids[len(prompt) :]


def _found(*, state_blocks: int, turns: int, thoughts: int = 0) -> float:
    """The share of earlier turns' tokens that a conversation's turns find. Its template drops `thoughts`."""
    scheduler, pool = new_scheduler(num_blocks=2000, state_blocks=state_blocks)
    rng, found, earlier = random.Random(1), 0, 0
    text, before = [*_words(rng, SYSTEM), END], 0
    for turn in range(turns):
        text += [*_words(rng, USER), END]
        count, answer = _answered(scheduler, pool, f"turn {turn}", [*text, *ASKED], thoughts + ANSWER)
        found, earlier = found + count, earlier + before
        text += [*(ASKED[:3] if thoughts else ASKED), *answer[thoughts:]]
        before = len(text)
    assert pool.num_used == 0
    return found / earlier


@pytest.mark.parametrize("state_blocks", [1, 8, 30])
@pytest.mark.parametrize("turns", [3, 5, 12])
def test_next_to_all_of_the_earlier_turns_is_found(turns: int, state_blocks: int) -> None:
    assert _found(state_blocks=state_blocks, turns=turns) >= 0.98


@pytest.mark.parametrize("state_blocks", [1, 8, 30])
def test_where_thoughts_are_dropped_as_much_is_found_as_without_states(state_blocks: int) -> None:
    """The end of the last question's message is where the next turn goes on."""
    assert (
        _found(state_blocks=state_blocks, turns=5, thoughts=80) >= _found(state_blocks=0, turns=5, thoughts=80) - 0.01
    )
