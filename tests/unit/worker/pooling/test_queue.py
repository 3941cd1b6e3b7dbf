"""Passes are filled by tokens over requests, in order; what a message may not ask is refused."""

from __future__ import annotations

import asyncio

import pytest

from common.blocks import pack_tokens
from common.errors import InvalidRequestError
from common.messages import Pool
from engine.pooling.engine import PoolingInput
from worker.pooling.queue import Asked, Queue, inputs_of


def asked(*lengths: int) -> Asked:
    inputs = [PoolingInput(tokens=[5] * length) for length in lengths]
    return Asked(inputs, 0.0, 1.0, asyncio.get_running_loop().create_future())


async def test_a_pass_takes_inputs_of_several_requests_up_to_its_tokens() -> None:
    queue, first, second = Queue(), asked(4, 4), asked(4, 20, 1)
    queue.add(first)
    queue.add(second)
    assert [(place.asked, place.at) for place in queue.take(12)] == [(first, 0), (first, 1), (second, 0)]
    assert [(place.asked, place.at) for place in queue.take(12)] == [(second, 1)], "one that is longer goes alone"
    assert (queue.tokens, len(queue)) == (1, 1)


async def test_inputs_of_ended_requests_are_dropped() -> None:
    queue, gone, other = Queue(), asked(3, 3), asked(2)
    queue.add(gone)
    queue.add(other)
    gone.done.cancel()
    assert [place.asked for place in queue.take(100)] == [other]
    assert (queue.tokens, len(queue)) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"inputs": [b"123"]}, "has 0.75 tokens"),
        ({"inputs": [b""]}, "has 0 tokens"),
        ({"inputs": [pack_tokens([1] * 9)]}, "has 9 tokens, and 1 to 8 are possible"),
        ({"inputs": [pack_tokens([50])]}, "token 50 is not in the vocabulary of 50"),
        ({"inputs": [pack_tokens([1])], "work": "classify"}, "is not this model's"),
        ({"inputs": [pack_tokens([1])], "dimensions": 5}, "a vector has 4, not 5"),
        ({"inputs": [pack_tokens([1])], "seconds": [0, 0]}, "2 second texts of 1 inputs"),
    ],
)
def test_a_message_is_checked(fields: dict[str, object], says: str) -> None:
    message = Pool(request_id="r", remaining_ms=1, **fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=says):
        inputs_of(message, vocab_size=50, longest=8, works=("embed",), size=4)
