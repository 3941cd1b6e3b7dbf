"""How long a sequence may be where workers differ."""

from __future__ import annotations

import pytest

from common.messages import WorkerState
from gateway.request.spec import context_of, cut_by_its_pool, long_enough, longest, usual
from tests.fakes.workers import LAYOUT, a_worker

POOL = LAYOUT.num_blocks * LAYOUT.block_size


def workers(*lengths: int) -> list[WorkerState]:
    return [a_worker(f"d{length}-{index}", "decode", max_model_len=length) for index, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "longest_one", "usual_one"),
    [
        ((), None, None),
        ((500,), 500, 500),
        ((16, 500), 500, 500),  # a short one cuts no answer
        ((16, 16, 500), 500, 16),
        ((400, 500), 500, 400),  # pools differ a little: both take answers of any length
        ((300, 300, 300, 1500), 1500, 300),  # the long one doesn't get them all
        ((300, 1000, 1500), 1500, 1000),
    ],
)
def test_one_worker_s_context_is_nobody_else_s(
    lengths: tuple[int, ...], longest_one: int | None, usual_one: int | None
) -> None:
    for order in (lengths, lengths[::-1]):
        assert (longest(workers(*order)), usual(workers(*order))) == (longest_one, usual_one)


def test_a_context_that_a_pool_cuts_is_that_of_the_longest() -> None:
    whole, cut = (
        a_worker("d0", "decode", max_model_len=500, whole_len=500),
        a_worker("d1", "decode", max_model_len=400, whole_len=500),
    )
    assert cut_by_its_pool([]) is cut_by_its_pool([whole]) is cut_by_its_pool([cut, whole]) is None
    assert cut_by_its_pool([cut]) is cut
    assert cut_by_its_pool([a_worker("old", "decode", max_model_len=400)]) is None


def test_nobody_is_believed_to_hold_more_than_its_pool() -> None:
    [boaster] = workers(2**40)
    assert context_of(boaster) == POOL


def test_who_takes_a_sequence() -> None:
    assert [context_of(one) for one in long_enough(workers(16, 100, 101), 100)] == [100, 101]
