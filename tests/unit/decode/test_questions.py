"""Questions that wait for room at a decode worker: asked again without the job, or with it by who is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from common.messages import Cancel, Reserve, ReserveAgain, ReserveReply, SamplingParams
from common.words import Refusal
from decode.questions import ASKED_AGAIN_S, Questions
from tests.fakes.worker import new_fake_engine, new_job
from tests.unit.decode.receiving import Receiver, running_receiver
from worker.identity import Identity

FOUR_TOKENS = SamplingParams(max_tokens=4)
FILLER = new_job("filler", list(range(30)), FOUR_TOKENS, prefill=True)
WAITING = new_job("waiting", list(range(40)), FOUR_TOKENS, prefill=True)
FULL = ReserveReply(granted=False, reason=Refusal.FULL)
UNKNOWN = ReserveReply(granted=False, reason=Refusal.UNKNOWN_JOB)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """Its pool is full once FILLER has its lease."""
    async with running_receiver() as receiver:
        assert (await receiver.reserve(FILLER)).granted
        yield receiver


async def test_who_waits_gets_its_lease_without_saying_the_job_again(receiver: Receiver) -> None:
    assert [await receiver.reserve(WAITING), await receiver.reserve_again(WAITING)] == [FULL] * 2
    await receiver.take_back(FILLER)
    lease = await receiver.reserve_again(WAITING)
    assert (lease.granted, len(lease.destination_blocks)) == (True, 4 * 10)
    assert [await receiver.reserve_again(WAITING), await receiver.reserve(WAITING)] == [
        lease
    ] * 2  # the answer was lost


async def test_a_question_is_its_writer_s_process_and_attempt_s_alone(receiver: Receiver) -> None:
    await receiver.reserve(WAITING)
    assert await receiver.reserve_again(WAITING, "p1") == UNKNOWN
    assert await receiver.reserve_again(WAITING, incarnation=2) == UNKNOWN
    assert await receiver.reserve_again(msgspec.structs.replace(WAITING, attempt=2)) == UNKNOWN
    assert await receiver.reserve_again(WAITING) == FULL


@pytest.mark.parametrize("writer", ["p0", "p1"])
async def test_who_takes_its_question_back_has_none_here(receiver: Receiver, writer: str) -> None:
    await receiver.reserve(WAITING)
    await receiver.take_back(WAITING, writer)
    assert await receiver.reserve_again(WAITING) == (UNKNOWN if writer == "p0" else FULL)
    assert (await receiver.reserve(WAITING)).reason is (Refusal.CANCELLED if writer == "p0" else Refusal.FULL)


async def test_what_a_gateway_cancelled_is_refused_when_it_is_asked_again(receiver: Receiver) -> None:
    await receiver.reserve(WAITING)
    await receiver.role.handle(Cancel(request_id="waiting", attempt=1, gateway=WAITING.gateway))
    assert (await receiver.reserve_again(WAITING)).reason is Refusal.CANCELLED


def test_questions_are_kept_up_to_a_bound_and_while_they_are_asked() -> None:
    def asked(name: str) -> Reserve:
        job = new_job(name, [1] * 10, FOUR_TOKENS, prefill=True)
        return Reserve(job=job, worker="p0", incarnation=1, remaining_ms=9, layout=new_fake_engine(16).layout)

    questions = Questions(max_bytes=100)
    for now, name in enumerate("abac"):  # of forty bytes each: the oldest goes
        questions.keep(asked(name), float(now))
    again = {name: ReserveAgain(**Identity("p0", 1).head(asked(name).job), remaining_ms=5) for name in "abc"}
    found = {name: questions.find(one) for name, one in again.items()}
    assert [name for name, one in found.items() if one is not None] == ["a", "c"]
    assert found["a"] == msgspec.structs.replace(asked("a"), remaining_ms=5)
    questions.look_after(2 + ASKED_AGAIN_S + 0.5)
    assert (questions.find(again["a"]), len(questions)) == (None, 1)
    questions.keep(msgspec.structs.replace(asked("d"), job=new_job("d", [1] * 26, FOUR_TOKENS)), 9.0)
    assert len(questions) == 0
