"""What other workers and gateways may end at a decode worker: what is theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from common.messages import Ack, Cancel, Dial, DialReply, Feature, Job, Reserve, ReserveReply, SamplingParams
from common.words import Refusal
from decode.role import DecodeRole
from kvtransfer.local import LocalTransport
from tests.fakes.worker import GATEWAY, Bench, new_fake_engine, new_job, running_bench


class Receiver:
    """A decode worker, and two that may write to it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.role = DecodeRole(bench.context)
        bench.roles.attach(self.role, active=True)
        for writer in ("p0", "p1"):
            bench.peers.saw(msgspec.structs.replace(bench.state(writer), features=frozenset(Feature)))

    async def reserve(self, job: Job, writer: str = "p0") -> ReserveReply:
        context = self.bench.context
        message = Reserve(job=job, worker=writer, incarnation=1, remaining_ms=60_000, layout=context.layout)
        reply = await self.role.handle(message)
        assert isinstance(reply, ReserveReply)
        return reply

    async def cancel(self, **name: str) -> bool:
        reply = await self.role.handle(Cancel(request_id="r", attempt=1, **name))
        assert isinstance(reply, Ack)
        return reply.known


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with running_bench(new_fake_engine(16), transport=LocalTransport()) as bench:
        receiver = Receiver(bench)
        yield receiver
        await receiver.role.close()


JOB = new_job("r", [1, 2, 3], SamplingParams(max_tokens=4), prefill=True)


async def test_a_writer_ends_its_own_lease_and_nobody_elses(receiver: Receiver) -> None:
    first = await receiver.reserve(JOB)
    assert first.granted
    assert not await receiver.cancel(worker="p1")
    assert (await receiver.reserve(JOB)).lease_id == first.lease_id
    assert await receiver.cancel(worker="p0")
    assert (await receiver.reserve(JOB)).reason is Refusal.CANCELLED  # its question may come after it was taken back
    assert (await receiver.reserve(JOB, "p1")).reason is Refusal.CANCELLED  # it took its own back


async def test_a_gateway_ends_its_own_requests_and_nobody_elses(receiver: Receiver) -> None:
    assert (await receiver.reserve(JOB)).granted
    assert not await receiver.cancel(gateway="another")
    assert (await receiver.reserve(JOB)).granted
    assert await receiver.cancel(gateway=GATEWAY)
    assert (await receiver.reserve(JOB)).reason is Refusal.CANCELLED


async def test_another_gateways_cancellation_ends_nothing_that_comes_after_it(receiver: Receiver) -> None:
    assert not await receiver.cancel(gateway="another")
    assert (await receiver.reserve(JOB)).granted


async def test_a_gateways_cancellation_may_come_before_its_request(receiver: Receiver) -> None:
    assert not await receiver.cancel(gateway=GATEWAY)
    assert (await receiver.reserve(JOB)).reason is Refusal.CANCELLED


async def test_a_peer_is_told_how_to_reach_the_pool(receiver: Receiver) -> None:
    reply = await receiver.role.handle(Dial(worker="p0", incarnation=1))
    assert reply == DialReply(region=receiver.bench.context.region)
