"""Each token of an answer has its own logprobs, wherever it was computed and whatever else was asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from common.blocks import unpack_tokens
from common.messages import Job, SamplingParams
from decode.role import DecodeRole
from tests.fakes.device import settled
from tests.fakes.pair import Pair, running_worker
from tests.fakes.worker import Bench, claim, new_job

PROMPT = list(range(20, 31))
MADE_EARLIER = 3  # tokens of a request that moved


@pytest.fixture
async def writer() -> AsyncIterator[Bench]:
    async with running_worker() as bench:
        yield bench


@pytest.fixture
async def receiver() -> AsyncIterator[Bench]:
    async with running_worker() as bench:
        yield bench


def asked(*, prompt_logprobs: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, prompt_logprobs=prompt_logprobs)


def likeliest(bench: Bench, name: str) -> list[int]:
    """The fake device holds each sampled token for the likeliest one."""
    return [one.top_ids[0] for one in bench.gateway.logprobs.get(name, [])]


@pytest.mark.parametrize("prompt_logprobs", [None, 0, 3])
async def test_through_a_hand_over(writer: Bench, receiver: Bench, prompt_logprobs: int | None) -> None:
    pair, sampling = Pair(writer, receiver), asked(prompt_logprobs=prompt_logprobs)
    tokens = await pair.answer("r", PROMPT, sampling)
    assert tokens == writer.engine.expected(PROMPT, 8, sampling)
    assert likeliest(writer, "r") + likeliest(receiver, "r") == tokens
    await pair.decode.close()


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
async def test_when_they_are_sent_again(writer: Bench, receiver: Bench, prompt_logprobs: int | None) -> None:
    """The first token is sent again where all that belongs to it is known."""
    pair = Pair(writer, receiver)
    tokens = await pair.answer("r", PROMPT, asked(prompt_logprobs=prompt_logprobs))
    [request] = pair.decode._requests.values()
    first = 0 if prompt_logprobs is None else 1
    for position in range(8):
        again = request.tokens_from(position)
        assert again is not None
        assert again.position == max(position, first)
        assert unpack_tokens(again.token_ids) == [one.top_ids[0] for one in again.logprobs] == tokens[again.position :]
    await pair.decode.close()


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
async def test_where_the_decode_worker_prefills(receiver: Bench, prompt_logprobs: int | None) -> None:
    role = DecodeRole(receiver.context)
    receiver.roles.attach(role, active=True)
    sampling = asked(prompt_logprobs=prompt_logprobs)
    assert await alone(role, receiver, new_job("r", PROMPT, sampling)) == receiver.engine.expected(PROMPT, 8, sampling)
    assert likeliest(receiver, "r") == receiver.gateway.streams["r"]
    await role.close()


async def test_of_an_attempt_that_goes_on(receiver: Bench) -> None:
    """It is asked for the prompt's logprobs no more, which the client has."""
    role = DecodeRole(receiver.context)
    receiver.roles.attach(role, active=True)
    sampling = asked(prompt_logprobs=None)
    tokens = receiver.engine.expected(PROMPT, 8, sampling)
    job = new_job("r", PROMPT + tokens[:MADE_EARLIER], sampling)
    receiver.gateway.streams["r"] = tokens[:MADE_EARLIER]
    await alone(role, receiver, msgspec.structs.replace(job, num_prompt_tokens=len(PROMPT)))
    assert likeliest(receiver, "r") == tokens[MADE_EARLIER:]
    await role.close()


async def alone(role: DecodeRole, bench: Bench, job: Job) -> list[int]:
    await role.start(claim(job, bench.gateway))
    while chunks := role.plan(9):
        role.apply(list(zip(chunks, bench.engine.launch(chunks).wait(), strict=True)))
    await settled()
    return bench.gateway.streams[job.request_id]
