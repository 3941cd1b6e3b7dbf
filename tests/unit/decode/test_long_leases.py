"""How long a lease lasts: as long as its writer says that it may write under it, up to the request's deadline."""

from __future__ import annotations

import asyncio

import msgspec

from common import subjects
from common.messages import (
    Ack,
    Feature,
    LeaseAborted,
    Resend,
    Reserve,
    ReserveReply,
    SamplingParams,
    ToWorker,
    WriterDone,
)
from decode.reservations import ASK_WRITER_S, LEASE_S
from decode.role import DecodeRole
from tests.fakes.pair import Pair, running_worker
from tests.fakes.worker import Bench, claim, new_job
from tests.simulation.clock import run_virtually

PROMPT = list(range(20, 56))  # four chunks
ANSWER = SamplingParams(max_tokens=4, temperature=0.0)
LOOKS_S = 0.5  # how often a decode worker looks after its leases


class Writer:
    """A prefill worker that says of its attempt what the test tells it to."""

    def __init__(self, receiver: Bench) -> None:
        self.receiver = receiver
        self.role = DecodeRole(receiver.context)
        receiver.roles.attach(self.role, active=True)
        receiver.peers.saw(msgspec.structs.replace(receiver.state("p"), features=frozenset(Feature)))
        self.knows = True
        self.asked: list[Resend] = []
        self.aborted_at: list[float] = []

    async def reserve(self, *, remaining_s: float) -> ReserveReply:
        await self.receiver.serve("p", self._answer)
        job = new_job("r", PROMPT, ANSWER, prefill=True)
        question = Reserve(
            job=job,
            worker="p",
            incarnation=1,
            remaining_ms=int(1000 * remaining_s),
            layout=self.receiver.context.cache.layout,
        )
        reply = await self.role.handle(question)
        assert isinstance(reply, ReserveReply)
        assert reply.granted
        return reply

    async def _answer(self, message: ToWorker) -> Ack | None:
        if isinstance(message, LeaseAborted):
            self.aborted_at.append(asyncio.get_running_loop().time())
            return None
        assert isinstance(message, Resend)
        self.asked.append(message)
        return Ack(known=self.knows)

    async def done(self, reply: ReserveReply) -> None:
        """Say that nothing is written any more."""
        head = self.receiver.context.identity.head(new_job("r", PROMPT, ANSWER))
        message = WriterDone(**head, lease_id=reply.lease_id, generation=reply.generation)
        await self.role.handle(msgspec.structs.replace(message, worker="p", incarnation=1))


def test_a_prompt_of_three_minutes_is_computed_once() -> None:
    """Its lease ended after 30 s, and it was computed again."""

    async def main() -> None:
        async with running_worker(name="w") as writer, running_worker(name="d0") as receiver:
            pair = Pair(writer, receiver)
            pair.pass_s = 45.0
            assert await pair.answer("r", PROMPT, ANSWER) == receiver.engine.expected(PROMPT, 4, ANSWER)
            assert asyncio.get_running_loop().time() >= 180.0
            assert (writer.gateway.ended["r"], len(pair.replies)) == ("settled", 1)
            assert (writer.pool.num_used, receiver.pool.num_used) == (0, 0)
            await pair.decode.close()

    run_virtually(main())


def test_the_deadline_ends_a_lease_that_its_writer_still_knows() -> None:
    async def main() -> None:
        async with running_worker(name="d0") as receiver:
            writer = Writer(receiver)
            reply = await writer.reserve(remaining_s=100.0)
            await asyncio.sleep(99.0)
            assert writer.aborted_at == []
            assert {one.worker for one in writer.asked} == {"d0"}
            await asyncio.sleep(1.0 + LOOKS_S)
            assert writer.aborted_at[0] >= 100.0
            assert receiver.pool.num_used > 0, "a write may still land"
            await writer.done(reply)
            assert receiver.pool.num_used == 0
            await writer.role.close()

    run_virtually(main())


def test_a_writer_that_answers_no_more_loses_its_lease_and_the_blocks_wait_for_its_word() -> None:
    async def main() -> None:
        async with running_worker(name="d0") as receiver:
            writer = Writer(receiver)
            reply = await writer.reserve(remaining_s=1000.0)
            await asyncio.sleep(60.0)
            receiver.bus.deaf.add(subjects.peer("p", "d0"))
            await asyncio.sleep(LEASE_S - ASK_WRITER_S - LOOKS_S)
            assert writer.aborted_at == []
            await asyncio.sleep(ASK_WRITER_S + 2 * LOOKS_S)
            assert len(writer.aborted_at) >= 1
            assert receiver.pool.num_used > 0
            await asyncio.sleep(1000.0)
            assert receiver.pool.num_used > 0
            await writer.done(reply)
            assert receiver.pool.num_used == 0
            await writer.role.close()

    run_virtually(main())


def test_a_lease_ends_soon_when_its_writer_knows_nothing_of_it() -> None:
    async def main() -> None:
        async with running_worker(name="d0") as receiver:
            writer = Writer(receiver)
            await writer.reserve(remaining_s=1000.0)
            await asyncio.sleep(60.0)
            writer.knows = False
            await asyncio.sleep(ASK_WRITER_S + 2 * LOOKS_S)
            assert 60.0 <= writer.aborted_at[0] < 60.0 + ASK_WRITER_S + 2 * LOOKS_S
            await writer.role.close()

    run_virtually(main())


async def test_a_decode_worker_whose_grant_was_not_taken_hears_that_nothing_is_written_there() -> None:
    """The attempt has another one's lease. With "yes" for both, blocks would be kept as long as the prompt is computed."""
    async with running_worker(name="w") as writer, running_worker(name="d0") as receiver:
        pair = Pair(writer, receiver)
        await writer.serve("d0", pair._handle)
        job = msgspec.structs.replace(new_job("r", PROMPT, ANSWER, prefill=True), decode_workers=["d0"])
        await pair.prefill.start(claim(job, writer.gateway))
        [request] = pair.prefill.serving
        question = Resend(request_id="r", attempt=1, position=0, worker="d1")
        assert await pair.prefill.handle(question) == Ack(known=True), "its grant may be on the way"
        chunks = pair.prefill.plan(9)
        while not request.decode_worker:
            request.changed.clear()
            await request.changed.wait()
        assert await pair.prefill.handle(question) == Ack(known=False)
        assert await pair.prefill.handle(msgspec.structs.replace(question, worker="d0")) == Ack(known=True)
        assert await pair.prefill.handle(msgspec.structs.replace(question, worker="")) == Ack(known=True)
        assert await pair.decode.handle(question) == Ack(known=False), "who decodes writes nowhere"
        pair.prefill.apply(list(zip(chunks, writer.engine.launch(chunks).wait(), strict=True)))
        [serving] = pair.prefill.serving.values()
        head = receiver.context.identity.head(job)
        await pair.prefill.handle(LeaseAborted(**head, lease_id=1, generation=1, reason="the test is over"))
        await serving
        await pair.decode.close()
