"""What the decode role says of its load while grammars are built for its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest

from common.messages import Cancel, Grammar, Region, Reserve, ReserveReply, SamplingParams
from common.words import Refusal
from decode.role import DecodeRole
from tests.fakes.device import settled
from tests.fakes.worker import Bench, claim, grammars_built, new_fake_engine, new_job, running_bench, slow_grammars
from worker.roles import CancelReason

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running_bench(new_fake_engine(16), max_sequences=4) as bench:
        bench.peers.saw(bench.state("p0"))
        yield bench


async def building(bench: Bench, count: int) -> DecodeRole:
    """A role with so many requests of three tokens whose grammar is not built."""
    role = DecodeRole(bench.context)
    bench.roles.attach(role, active=True)
    for number in range(count):
        job = msgspec.structs.replace(new_job(f"r{number}", [1, 2, 3], ONE_TOKEN), grammar=Grammar(allowed=[5]))
        await role.start(claim(job, bench.gateway))
    await settled()
    return role


async def test_a_request_has_its_place_while_its_grammar_is_built(bench: Bench) -> None:
    """Else a worker would take far more jobs than it can run, and end before they did."""
    with slow_grammars(bench):
        role = await building(bench, 3)
        load = role.load()
        assert (role.room(), role.idle()) == (1, False)
        assert (load.running, load.waiting, load.queued_tokens) == (0, 3, 6)
    await grammars_built(bench)
    chunks = role.plan(16)
    role.apply(list(zip(chunks, bench.engine.launch(chunks).wait(), strict=True)))
    await settled()
    assert bench.gateway.ended == dict.fromkeys(("r0", "r1", "r2"), "length")
    assert bench.gateway.streams == {name: [5] for name in ("r0", "r1", "r2")}
    assert (role.room(), role.idle(), role.load().waiting) == (4, True, 0)
    await role.close()


async def test_no_lease_is_granted_for_a_place_that_waits_for_its_grammar(bench: Bench) -> None:
    with slow_grammars(bench):
        role = await building(bench, 4)
        context, job = bench.context, new_job("other", [1, 2, 3], ONE_TOKEN, prefill=True)
        question = Reserve(job=job, worker="p0", incarnation=1, remaining_ms=60_000, layout=context.cache.layout)
        reply = await role.handle(question)
        assert isinstance(reply, ReserveReply)
        assert (reply.granted, reply.reason) == (False, Refusal.FULL)
        await role.handle(Cancel(request_id="r0", attempt=1))
        reply = await role.handle(question)
        assert isinstance(reply, ReserveReply)
        assert reply.granted
    await role.close()


@pytest.mark.parametrize("end", ["cancelled", "stopped", "late"])
async def test_who_ends_while_its_grammar_is_built_leaves_its_place(bench: Bench, end: str) -> None:
    with slow_grammars(bench):
        role = await building(bench, 1)
        [request] = role._requests.values()
        if end == "cancelled":
            await role.handle(Cancel(request_id="r0", attempt=1))
        elif end == "stopped":
            await role.cancel_all(CancelReason.WORKER_STOPPED)
        else:
            request.deadline_at = 0.0
            assert role.plan(16) == []
        assert (role.room(), role.idle()) == (4, True)
    await grammars_built(bench)
    assert (role.plan(16), role.room(), role.idle()) == ([], 4, True)
    assert bench.gateway.ended == {"r0": "dropped"}
    await role.close()


async def test_a_lease_for_another_layout_is_refused_with_the_difference(bench: Bench) -> None:
    """Workers on processors with bfloat16 and without choose other dtypes for one checkpoint."""
    role, layout = await building(bench, 0), bench.context.cache.layout
    other = "bfloat16" if layout.dtype != "bfloat16" else "float32"
    job = new_job("r0", [1, 2, 3], ONE_TOKEN, prefill=True)
    theirs = msgspec.structs.replace(layout, dtype=other)
    reply = await role.handle(Reserve(job=job, worker="p0", incarnation=1, remaining_ms=60_000, layout=theirs))
    assert isinstance(reply, ReserveReply)
    assert (reply.granted, reply.reason) == (False, Refusal.INCOMPATIBLE)
    assert f"dtype is {other} here, {layout.dtype} at the peer" in reply.detail
    await role.close()


async def test_a_writer_of_a_release_without_ranks_gets_no_lease_on_those_of_several(bench: Bench) -> None:
    """It would write into the first one's memory alone."""
    transfers = bench.context.transfers
    region = Region.joined([transfers.region] * 2)
    bench.context = replace(bench.context, transfers=replace(transfers, region=region))
    role = await building(bench, 0)
    job = new_job("r0", [1, 2, 3], ONE_TOKEN, prefill=True)
    question = Reserve(job=job, worker="p0", incarnation=1, remaining_ms=60_000, layout=bench.context.cache.layout)
    reply = await role.handle(question)
    assert isinstance(reply, ReserveReply)
    assert (reply.reason, reply.detail) == (Refusal.INCOMPATIBLE, "its release writes to workers of one rank alone")
    reply = await role.handle(msgspec.structs.replace(question, num_ranks=1))
    assert isinstance(reply, ReserveReply)
    assert reply.reason is not Refusal.INCOMPATIBLE
    await role.close()
