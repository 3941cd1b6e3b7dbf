"""Which prompts share a pass."""

from __future__ import annotations

import pytest

from prefill.scheduler import FULL_PASS_TOKENS, LONG_PROMPT_TOKENS, TAIL_TOKENS, next_chunks
from tests.unit.prefill.scheduling import waiting


@pytest.mark.parametrize(
    ("lengths", "budget", "planned"),
    [
        ((100, 200, 300), 8192, [100, 200, 300]),  # short ones together
        ((FULL_PASS_TOKENS, 10), 8192, [FULL_PASS_TOKENS]),  # a full pass makes nobody wait for the next prompt
        ((FULL_PASS_TOKENS - 8, 100, 5), 8192, [FULL_PASS_TOKENS - 8, 8]),  # filled up with a part of the next
        ((LONG_PROMPT_TOKENS, 10), 8192, [LONG_PROMPT_TOKENS]),  # a prompt in one go
        ((5000, 10), 8192, [5000 - TAIL_TOKENS]),  # all but the tail, which hides the push
        ((9000, 10), 8192, [8192]),  # or in chunks
        ((300, 300), 512, [300, 212]),  # a small device's budget
    ],
)
def test_a_pass(lengths: tuple[int, ...], budget: int, planned: list[int]) -> None:
    assert [chunk.num_tokens for chunk in next_chunks(waiting(*lengths), budget)] == planned


def test_a_slow_devices_full_pass_is_smaller() -> None:
    planned = [chunk.num_tokens for chunk in next_chunks(waiting(100, 200, 300), 8192, full_pass_tokens=150)]
    assert planned == [100, 50]
    assert [chunk.num_tokens for chunk in next_chunks(waiting(400, 10), 8192, full_pass_tokens=150)] == [400]


def test_nobody_joins_the_tail_of_a_long_prompt() -> None:
    requests = waiting(5000, 10)
    next_chunks(requests, 8192)
    assert [(chunk.start, chunk.num_tokens, chunk.sample) for chunk in next_chunks(requests, 8192)] == [
        (5000 - TAIL_TOKENS, TAIL_TOKENS, True)
    ]
    assert [chunk.num_tokens for chunk in next_chunks(requests, 8192)] == [10]


def test_nothing_is_left_out_or_computed_twice() -> None:
    requests = waiting(300, 5000, 2100, 17)
    computed = {request.id: 0 for request in requests}
    while chunks := next_chunks(requests, 1000):
        assert sum(chunk.num_tokens for chunk in chunks) <= 1000
        for chunk in chunks:
            assert chunk.start == computed[chunk.sequence.request_id]
            computed[chunk.sequence.request_id] = chunk.end
    assert list(computed.values()) == [300, 5000, 2100, 17]
