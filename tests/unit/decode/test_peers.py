"""What other workers and gateways may end at a decode worker: what is theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from common.messages import Dial, DialReply, SamplingParams
from common.words import Refusal
from tests.fakes.worker import GATEWAY, new_job
from tests.unit.decode.receiving import Receiver, running_receiver


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with running_receiver() as receiver:
        yield receiver


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
    assert reply == DialReply(region=receiver.bench.context.transfers.region)
