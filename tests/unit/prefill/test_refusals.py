"""What becomes of a prompt that no decode worker takes: its attempt ends, and its gateway hears why."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from common.messages import (
    Ack,
    Failed,
    Feature,
    Grammar,
    Resend,
    Reserve,
    ReserveAgain,
    ReserveReply,
    SamplingParams,
    ToWorker,
    WorkerReply,
    decode,
    worker_reply_decoder,
)
from common.tasks import cancel_all
from common.words import Refusal
from decode.role import DecodeRole
from prefill import reserving
from prefill.role import PrefillRole
from tests.fakes.worker import Bench, claim, grammars_built, new_fake_engine, new_job, running_bench
from worker.roles import CancelReason

PROMPT = list(range(20, 40))
FOUR_TOKENS = SamplingParams(max_tokens=4, temperature=0.0)
MANY_ROUNDS = 50
Answer = Callable[[str, Any], Awaitable[WorkerReply]]


class Refused:
    """A prefill role whose request meets candidates that the test answers for; `told` is what its gateway heard."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.role = PrefillRole(bench.context, max_requests=4)
        self.asked: Counter[str] = Counter()

    @property
    def told(self) -> Failed:
        return self.bench.gateway.failures["r"]

    async def run(self, answer: Answer, *candidates: str, **asked: Any) -> None:
        """Serve the request to its end."""

        async def handle(message: ToWorker, *, worker: str) -> WorkerReply:
            if not isinstance(message, Reserve | ReserveAgain):
                return Ack(known=True)
            self.asked[worker] += 1
            if self.asked[worker] > MANY_ROUNDS:  # it would go on for ever
                await self.role.cancel_all(CancelReason.WORKER_STOPPED)
            return await answer(worker, message)

        for worker in candidates:
            await self.bench.serve(worker, functools.partial(handle, worker=worker))
        job = new_job("r", PROMPT, FOUR_TOKENS, prefill=True)
        job = msgspec.structs.replace(job, decode_workers=list(candidates), **asked)
        await self.role.start(claim(job, self.bench.gateway))
        if job.grammar is not None:
            await grammars_built(self.bench)
        chunks = self.role.plan(8)
        self.role.apply(list(zip(chunks, self.bench.engine.launch(chunks).wait(), strict=True)))
        [serving] = self.role.serving.values()
        await serving
        assert self.bench.pool.num_used == 0


@pytest.fixture
async def refused(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Refused]:
    monkeypatch.setattr(reserving, "ASK_AGAIN_S", 0.0)
    async with running_bench(new_fake_engine(16)) as bench:
        yield Refused(bench)


async def test_a_job_that_no_candidate_can_take_fails_with_what_they_say(refused: Refused) -> None:
    """It was asked again every 50 ms until its deadline, and held its blocks, when decode workers had less room."""
    other = Bench(new_fake_engine(16, max_model_len=16))
    other.peers.saw(other.state("w"))
    decode_role = DecodeRole(other.context)
    other.roles.attach(decode_role, active=True)

    async def answer(worker: str, message: Reserve) -> WorkerReply:
        reply = await decode_role.handle(message)
        assert reply is not None
        return reply

    await refused.run(answer, "d0", "d1")
    await cancel_all(other.context.background.tasks)

    assert refused.asked == {"d0": 1, "d1": 1}
    assert (refused.told.code, refused.told.retryable) == ("invalid_request", False)
    why = "the sequence has 20 tokens; this model serves 16 with the answer"
    assert refused.told.message == f"no decode worker can take this request: d0: {why}; d1: {why}"


async def test_a_release_before_that_finds_the_job_invalid_ends_the_attempt_too(refused: Refused) -> None:
    async def answer(worker: str, message: Reserve) -> WorkerReply:
        said = {"type": "reserve_reply", "granted": False, "reason": "invalid: prompt too long"}
        return decode(worker_reply_decoder, msgspec.msgpack.encode(said))

    await refused.run(answer, "d0")
    assert refused.asked == {"d0": 1}
    assert (refused.told.code, refused.told.retryable) == ("invalid_request", False)


async def test_a_candidate_that_refuses_for_good_is_not_asked_while_another_is_full(refused: Refused) -> None:
    rounds = {"d0": [Refusal.STALE], "d1": [Refusal.FULL] * 6 + [Refusal.DRAINING]}

    async def answer(worker: str, message: Reserve) -> WorkerReply:
        return ReserveReply(granted=False, reason=rounds[worker].pop(0))

    await refused.run(answer, "d0", "d1")
    assert refused.asked == {"d0": 1, "d1": 7}
    assert (refused.told.code, refused.told.retryable) == ("place_again", True)


@pytest.mark.parametrize(
    ("feature", "asked"),
    [
        ("grammars", {"grammar": Grammar(allowed=[5])}),
        ("typical_p", {"sampling": SamplingParams(max_tokens=4, typical_p=0.9)}),
    ],
)
async def test_a_candidate_that_would_ignore_what_is_asked_is_not_asked(
    refused: Refused, feature: str, asked: dict[str, Any]
) -> None:
    """It may have come under the name of one that follows grammars."""
    bench = refused.bench
    for name, does in (("d0", False), ("d1", True)):
        features = frozenset(Feature if does else {Feature.NAMED})
        bench.peers.saw(msgspec.structs.replace(bench.state(name), features=features))

    async def answer(worker: str, message: Reserve) -> WorkerReply:
        return ReserveReply(granted=False, reason=Refusal.DRAINING)

    await refused.run(answer, "d0", "d1", **asked)
    assert refused.asked == {"d1": 1}
    assert (refused.told.code, refused.told.retryable) == ("place_again", True)
    assert f"d0: it doesn't follow {feature}" in refused.told.message


@pytest.mark.parametrize(
    ("features", "kinds"),
    [
        (frozenset(Feature), [Reserve, ReserveAgain, ReserveAgain, Reserve, ReserveAgain, Reserve]),
        (frozenset({Feature.NAMED}), [Reserve] * 5),  # an older build
    ],
)
async def test_a_candidate_that_keeps_the_job_is_asked_again_without_it(
    refused: Refused, features: frozenset[str], kinds: list[type]
) -> None:
    """Until it has forgotten it, or another process has its name."""
    bench, rounds = refused.bench, [Refusal.FULL] * 4 + [Refusal.DRAINING]
    heard = list[type]()
    bench.peers.saw(msgspec.structs.replace(bench.state("d0"), features=features))

    async def answer(worker: str, message: Reserve | ReserveAgain) -> WorkerReply:
        heard.append(type(message))
        if isinstance(message, ReserveAgain):
            assert (message.request_id, message.attempt, message.worker) == ("r", 1, "w")
            if heard == kinds[:3]:
                return ReserveReply(granted=False, reason=Refusal.UNKNOWN_JOB)
        if heard == kinds[:5]:
            bench.peers.saw(msgspec.structs.replace(bench.state("d0", incarnation=2), features=features))
        return ReserveReply(granted=False, reason=rounds.pop(0))

    await refused.run(answer, "d0")
    assert heard == kinds


async def test_who_finds_every_decode_worker_full_says_that_it_waits(refused: Refused) -> None:
    said: list[object] = []
    rounds = [Refusal.FULL, Refusal.FULL, Refusal.VERIFYING, Refusal.DRAINING]

    async def answer(worker: str, message: Reserve) -> WorkerReply:
        said.append(await refused.role.handle(Resend(request_id="r", attempt=1, position=9)))
        return ReserveReply(granted=False, reason=rounds.pop(0))

    await refused.run(answer, "d0")
    assert said == [Ack(known=True, waits=waits) for waits in (False, True, True, False)]


async def test_a_lease_that_does_not_fit_the_prompt_ends_the_attempt(refused: Refused) -> None:
    """The error was only logged, and the request waited for its deadline with the lease and its blocks."""

    async def answer(worker: str, message: Reserve) -> WorkerReply:
        return ReserveReply(granted=True, region=refused.bench.context.transfers.region, first_block=99)

    await refused.run(answer, "d0")
    assert (refused.told.code, refused.told.retryable) == ("worker_failed", True)
    assert "the lease has 99 + 0 blocks, the prompt 5" in refused.told.message
