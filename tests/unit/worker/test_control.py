"""What a worker does with what others ask of it: jobs, roles, draining, questions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from common.messages import (
    Ack,
    Cancel,
    Drain,
    GatewayState,
    Job,
    Keep,
    Received,
    Resend,
    RolesReply,
    SamplingParams,
    SetRoles,
)
from engine.sequence import Hold
from tests.fakes.role import NotingRole
from tests.fakes.worker import Bench, claim, new_fake_engine, new_job, running_bench
from worker.control import Control
from worker.fencing import Fencing, Heard
from worker.roles import Roles


class Controlled:
    """A worker of two roles, of which decode is active."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.roles = Roles(hands_over=True)
        self.roles.status = "ready"
        self.decode, self.prefill = NotingRole("decode"), NotingRole("prefill")
        self.roles.attach(self.decode, active=True)
        self.roles.attach(self.prefill, active=False)
        self.told: list[tuple[str, list[str]]] = []
        self.fencing = Fencing(bus=bench.bus, roles=self.roles, identity=bench.context.identity)
        self.control = Control(
            identity=bench.context.identity,
            roles=self.roles,
            jobs=bench.context.jobs,
            fencing=self.fencing,
            tell=self._tell,
            called=bench.context.cache.pool.returning.called,
        )

    async def _tell(self) -> None:
        self.told.append((self.roles.status, self.roles.names))

    async def ask(self, message: SetRoles | Drain) -> RolesReply:
        reply = await self.control.handle(message)
        assert isinstance(reply, RolesReply)
        return reply


@pytest.fixture
async def worker() -> AsyncIterator[Controlled]:
    async with running_bench(new_fake_engine(16)) as bench:
        yield Controlled(bench)


def job(*, prefill: bool) -> Job:
    return new_job("r", [1, 2], SamplingParams(max_tokens=1), prefill=prefill)


async def test_a_job_goes_to_the_active_role_that_takes_it(worker: Controlled) -> None:
    local = job(prefill=False)
    await worker.control.start_job(claim(local, worker.bench.gateway))
    assert (worker.decode.started, worker.prefill.started) == ([local], [])


async def test_a_job_for_a_role_that_was_left_is_placed_again(worker: Controlled) -> None:
    await worker.control.start_job(claim(job(prefill=True), worker.bench.gateway))
    failed = worker.bench.gateway.failures["r"]
    assert (failed.code, failed.retryable, failed.message) == ("place_again", True, "w has the roles decode now")
    assert worker.prefill.started == []


async def test_a_claimed_job_s_gateway_is_watched_before_its_first_heartbeat(worker: Controlled) -> None:
    await worker.control.start_job(claim(job(prefill=False), worker.bench.gateway))
    assert worker.fencing.saw(GatewayState(gateway="gw", incarnation=5)) is Heard.KNOWN


async def test_a_change_of_roles_is_told_before_it_is_answered(worker: Controlled) -> None:
    reply = await worker.ask(SetRoles(roles=["prefill"], reason="test"))
    assert (reply.accepted, reply.roles) == (True, ["prefill"])
    assert worker.told == [("ready", ["prefill"])]
    assert (worker.prefill.prepared, worker.decode.prepared) == (1, 0)
    assert (await worker.ask(SetRoles(roles=["prefill"], reason="again"))).accepted
    assert len(worker.told) == 1, "nothing changed"


async def test_roles_that_the_worker_can_t_have_change_nothing_and_are_explained(worker: Controlled) -> None:
    reply = await worker.ask(SetRoles(roles=["encode"], reason="test"))
    assert (reply.accepted, reply.roles) == (False, ["decode"])
    assert "choose from decode, prefill" in reply.reason
    assert worker.told == []


async def test_a_drained_worker_takes_no_work_and_no_roles_until_it_is_told_to(worker: Controlled) -> None:
    assert (await worker.ask(Drain(draining=True, reason="test"))).accepted
    assert worker.roles.room() == 0
    assert (await worker.ask(SetRoles(roles=["prefill"], reason="test"))).reason == "the worker is draining"
    assert (await worker.ask(Drain(draining=True, reason="again"))).accepted
    assert (await worker.ask(Drain(draining=False, reason="test"))).accepted
    assert worker.roles.room() > 0
    assert [status for status, _ in worker.told] == ["draining", "ready"]


async def test_a_worker_that_starts_or_stops_is_not_told_otherwise(worker: Controlled) -> None:
    worker.roles.status = "starting"
    assert (await worker.ask(Drain(draining=True, reason="test"))).reason == "the worker is starting"
    worker.control.stop()
    assert worker.roles.status == "draining"
    reply = await worker.ask(Drain(draining=False, reason="test"))
    assert (reply.accepted, reply.reason) == (False, "the worker is stopping")
    assert worker.roles.room() == 0


@pytest.mark.parametrize(
    ("answers", "known"),
    [
        ((Ack(known=False), Ack(known=True)), True),
        ((Ack(known=False), Ack(known=False)), False),
        ((None, Ack(known=True)), True),
        ((None, None), False),
    ],
)
async def test_a_cancelled_request_is_known_if_any_role_knows_it(
    worker: Controlled, answers: tuple[Ack | None, Ack | None], known: bool
) -> None:
    worker.decode.answer, worker.prefill.answer = answers
    assert await worker.control.handle(Cancel(request_id="r", attempt=1)) == Ack(known=known)


async def test_other_questions_are_answered_by_the_role_that_has_an_answer(worker: Controlled) -> None:
    question = Received(request_id="r", attempt=1)
    assert await worker.control.handle(question) == Ack(known=False)
    worker.prefill.answer = Ack(known=True)
    assert await worker.control.handle(question) == Ack(known=True)


async def test_blocks_of_a_request_that_ended_by_a_call_outlast_others(worker: Controlled) -> None:
    pool = worker.bench.context.cache.pool
    for request, digest in (("called", b"a" * 16), ("other", b"b" * 16)):
        blocks = pool.allocate(1)
        pool.publish(blocks[0], digest)
        pool.release(blocks, Hold.of(Keep(call_ttl_s=60.0), 0, request))
    await worker.control.handle(Received(request_id="called", attempt=1, is_call=True))
    pool.allocate(pool.num_blocks - 1)
    assert pool.cached_digests() == [b"a" * 16]


async def test_who_asks_for_tokens_hears_that_the_request_waits(
    worker: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits(message: object) -> Ack:
        return Ack(known=True, waits=True)

    monkeypatch.setattr(worker.prefill, "handle", waits)
    reply = await worker.control.handle(Resend(request_id="r", attempt=1, position=0))
    assert reply == Ack(known=True, waits=True)
