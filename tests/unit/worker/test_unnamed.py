"""What a worker believes of what comes without the speaker's name, as release 0.1.0 says it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from common.messages import (
    ANYBODY_THERE,
    Ack,
    Cancel,
    Drain,
    Feature,
    GatewayState,
    Received,
    Resend,
    RolesReply,
    SetRoles,
    ToWorker,
    WorkerReply,
    WriterDone,
)
from tests.fakes.worker import Bench, new_fake_engine, running_bench
from worker.unnamed import OLD_WRITERS, Unnamed

DONE = WriterDone(request_id="r", attempt=1, worker="p", incarnation=1, lease_id=1, generation=1)
CANCEL = Cancel(request_id="r", attempt=1)
ORDERS = [SetRoles(roles=["prefill"]), Drain()]


class Listening:
    """A worker's ear for release 0.1.0; `taken` is what it passed on."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.taken: list[ToWorker] = []
        context = bench.context
        self.unnamed = Unnamed(bus=bench.bus, peers=bench.peers, identity=context.identity, handle=self._take)

    async def _take(self, message: ToWorker) -> WorkerReply:
        self.taken.append(message)
        return Ack(known=True)

    def hear(self, worker: str, *, named: bool) -> None:
        """A worker's heartbeat."""
        features = frozenset({Feature.NAMED} if named else ())
        self.bench.peers.saw(msgspec.structs.replace(self.bench.state(worker), features=features))

    def hear_gateway(self, *, named: bool) -> None:
        self.bench.context.identity.heard(GatewayState(gateway="g", incarnation=1, named=named))


@pytest.fixture
async def worker() -> AsyncIterator[Listening]:
    async with running_bench(new_fake_engine(16)) as bench:
        yield Listening(bench)


async def test_a_worker_of_the_first_release_is_believed(worker: Listening) -> None:
    worker.hear("p", named=False)
    assert await worker.unnamed.handle(DONE) == Ack(known=True)
    assert worker.taken == [DONE]


@pytest.mark.parametrize("heard", ["with its name", "never"])
async def test_nobody_speaks_here_for_a_worker_that_says_its_name(worker: Listening, heard: str) -> None:
    worker.hear_gateway(named=False)
    if heard == "with its name":
        worker.hear("p", named=True)
    assert await worker.unnamed.handle(DONE) == Ack(known=False)
    assert (worker.taken, worker.bench.bus.forged) == ([], 1)


@pytest.mark.parametrize("order", ORDERS)
async def test_orders_are_taken_while_a_gateway_of_the_first_release_is_there(
    worker: Listening, order: SetRoles | Drain
) -> None:
    worker.hear_gateway(named=False)
    await worker.unnamed.handle(order)
    worker.hear_gateway(named=True)  # it was replaced
    reply = await worker.unnamed.handle(order)
    assert isinstance(reply, RolesReply)
    assert (reply.accepted, "upgrade" in reply.reason) == (False, True)
    assert worker.taken == [order]


async def test_an_old_worker_ends_no_more_than_what_old_workers_asked_for(worker: Listening) -> None:
    """It can't be told which one speaks, so a cancel is about the leases of those that don't say their names."""
    worker.hear("p", named=False)
    await worker.unnamed.handle(CANCEL)
    assert worker.taken == [msgspec.structs.replace(CANCEL, worker=OLD_WRITERS)]
    await worker.unnamed.handle(Received(request_id="r", attempt=1))
    assert worker.bench.bus.forged == 1


async def test_without_an_old_process_only_the_question_for_the_name_is_answered(worker: Listening) -> None:
    worker.hear("p", named=True)
    for message in (CANCEL, Received(request_id="r", attempt=1), Resend(request_id="r", attempt=1, position=0)):
        await worker.unnamed.handle(message)
    assert (worker.taken, worker.bench.bus.forged) == ([], 3)
    assert await worker.unnamed.handle(ANYBODY_THERE) == Ack(known=True)
