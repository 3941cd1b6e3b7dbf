"""A prompt that nobody else has room for goes on in the worker that computed it, in the blocks that it has."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator

import msgspec
import pytest

from common import subjects
from common.blocks import pack_tokens, unpack_tokens
from common.messages import (
    Ack,
    Cancel,
    Job,
    PagePart,
    Resend,
    Reserve,
    ReserveReply,
    SamplingParams,
    SettleReply,
    ToGateway,
    ToWorker,
    WriterDone,
    to_gateway_decoder,
)
from common.words import Refusal
from decode.role import DecodeRole
from prefill import reserving
from prefill.role import PrefillRole
from tests.fakes.device import settled
from tests.fakes.worker import GATEWAY, Bench, claim, new_fake_engine, new_job, running_bench

KEYS = PagePart(layers=1, planes=2, heads=1, dim=4, dtype="float32")
STATES = PagePart(layers=2, planes=1, heads=1, dim=24, dtype="float32", per_token=False)  # a block for each layer
PROMPT = list(range(20, 44))  # six blocks: with a state's, all of the pool but one
SHORT = list(range(3))
FOUR_TOKENS = SamplingParams(max_tokens=4, temperature=0.0)


class BothRoles:
    """A worker with both roles and a batch of one. The other candidate says what it has room for: nothing."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.decode, self.prefill = DecodeRole(bench.context), PrefillRole(bench.context, max_requests=4)
        for role in (self.decode, self.prefill):
            bench.roles.attach(role, active=True)
        self.told: list[ToWorker] = []
        self.stands_still = False
        self.late_answer: asyncio.Future[ReserveReply] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        await self.bench.serve("elsewhere", self._answer)
        await self.bench.serve("w", functools.partial(self._answer, is_own=True))

    async def _answer(self, message: ToWorker, *, is_own: bool = False) -> Ack | ReserveReply:
        assert not is_own, "the worker asked itself for room"
        self.told.append(message)
        if not isinstance(message, Reserve):
            return Ack(known=True)
        if self.stands_still:
            return await self.late_answer
        return ReserveReply(granted=False, reason=Refusal.FULL)

    async def claim(self, job: Job) -> None:
        role = self.prefill if job.decode_workers else self.decode
        await role.start(claim(job, self.bench.gateway))
        await settled()

    async def step(self, *, stand_still: bool = False, arriving: Job | None = None) -> list[str]:
        """Compute a pass of both roles; who was in it. Meanwhile the other candidate may stand still, or a job arrive."""
        planned = [(role, role.plan(32)) for role in (self.decode, self.prefill)]
        await settled()
        self.stands_still = stand_still
        if arriving is not None:
            await self.claim(arriving)
        await settled()
        for role, chunks in planned:
            role.apply(list(zip(chunks, self.bench.engine.launch(chunks).wait(), strict=True)))
        await settled()
        return [chunk.sequence.request_id for _, chunks in planned for chunk in chunks]

    @property
    def is_idle(self) -> bool:
        return self.bench.pool.num_used == 0 and self.prefill.idle() and self.decode.idle()


@pytest.fixture
async def worker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BothRoles]:
    monkeypatch.setattr(reserving, "ASK_AGAIN_S", 0.0)
    async with running_bench(new_fake_engine(9, parts=[KEYS, STATES]), max_sequences=1) as bench:
        worker = BothRoles(bench)
        await worker.start()
        yield worker


def handed_over(prompt: list[int], *candidates: str) -> Job:
    return msgspec.structs.replace(new_job("r", prompt, FOUR_TOKENS, prefill=True), decode_workers=list(candidates))


@pytest.mark.parametrize("candidates", [("elsewhere", "w"), ("w",), ("elsewhere",)])
async def test_a_prompt_goes_on_although_another_waits_for_its_blocks(
    worker: BothRoles, candidates: tuple[str, ...]
) -> None:
    """A lease here would need three blocks more, and one is left. Both stood until their deadlines."""
    await worker.claim(handed_over(PROMPT, *candidates))
    assert await worker.step(arriving=new_job("waiting", SHORT, FOUR_TOKENS)) == ["r"]

    assert [await worker.step() for _ in range(7)] == 3 * [["r"]] + 4 * [["waiting"]]
    expected = {"r": PROMPT, "waiting": SHORT}
    engine, gateway = worker.bench.engine, worker.bench.gateway
    assert gateway.streams == {name: engine.expected(ids, 4, FOUR_TOKENS) for name, ids in expected.items()}
    assert gateway.ended == dict.fromkeys(expected, "length")
    assert worker.is_idle


async def test_it_waits_for_a_place_in_the_batch(worker: BothRoles) -> None:
    await worker.claim(new_job("running", SHORT, FOUR_TOKENS))
    await worker.step()
    await worker.claim(handed_over(SHORT, "elsewhere", "w"))

    steps = [await worker.step() for _ in range(6)]

    assert steps == [["running", "r"], ["running"], ["running"], *3 * [["r"]]]
    assert worker.is_idle


async def test_who_has_not_answered_yet_is_told_that_the_question_is_over(worker: BothRoles) -> None:
    await worker.claim(handed_over(PROMPT, "elsewhere", "w"))

    await worker.step(stand_still=True)

    assert worker.bench.gateway.ended["r"] == "settled"
    [cancel] = [message for message in worker.told if isinstance(message, Cancel)]
    assert (cancel.request_id, cancel.worker) == ("r", "w")


async def test_who_had_no_room_is_told_too(worker: BothRoles) -> None:
    """It may keep blocks for the question by now."""
    await worker.claim(handed_over(PROMPT, "elsewhere", "w"))

    await worker.step()
    await worker.step()

    [cancel] = [message for message in worker.told if isinstance(message, Cancel)]
    assert (cancel.request_id, cancel.worker) == ("r", "w")


async def test_a_lease_that_is_granted_too_late_is_given_back(worker: BothRoles) -> None:
    region = worker.bench.context.transfers.region
    granted = ReserveReply(
        granted=True, incarnation=1, lease_id=7, generation=8, destination_blocks=pack_tokens(range(8)), region=region
    )

    async def settle_late(message: ToGateway) -> SettleReply:
        worker.late_answer.set_result(granted)
        await settled()
        return SettleReply(ack=True)

    await worker.bench.bus.serve(subjects.gateway(GATEWAY, subjects.ANY), to_gateway_decoder, settle_late)
    await worker.claim(handed_over(PROMPT, "elsewhere", "w"))

    await worker.step(stand_still=True)

    await settled()
    [done] = [message for message in worker.told if isinstance(message, WriterDone)]
    assert (done.lease_id, done.generation) == (7, 8)
    assert await worker.step() == ["r"]


async def test_the_whole_answer_can_be_sent_again_and_cancelled(worker: BothRoles) -> None:
    await worker.claim(handed_over(PROMPT, "elsewhere", "w"))
    await worker.step()
    assert worker.prefill.idle(), "it is the other role's now"
    await worker.step()
    sent: list[list[int]] = []
    worker.bench.gateway._take_tokens = lambda tokens: sent.append(unpack_tokens(tokens.token_ids))  # type: ignore[method-assign]

    assert await worker.decode.handle(Resend(request_id="r", attempt=1, position=0)) == Ack(known=True)
    await settled()
    assert sent == [worker.bench.engine.expected(PROMPT, 2, FOUR_TOKENS)]
    assert await worker.decode.handle(Cancel(request_id="r", attempt=1)) == Ack(known=True)
    assert worker.is_idle


async def test_a_retired_decode_role_takes_nothing_over(worker: BothRoles) -> None:
    await worker.bench.roles.change(["prefill"])
    await worker.claim(handed_over(PROMPT, "elsewhere"))
    await worker.step()

    assert not worker.prefill.idle()
    await worker.prefill.handle(Cancel(request_id="r", attempt=1))
    await settled()
    assert worker.is_idle
