"""A stream of small handoffs that always find room, and a large request that does not: it gets its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from common.messages import Ack, Cancel, Feature, Job, Reserve, ReserveReply, SamplingParams, WriterDone
from common.words import Refusal
from decode import intake
from decode.role import DecodeRole
from engine.sequence import Sequence
from prefill.role import PrefillRole
from tests.fakes.device import settled
from tests.fakes.worker import Bench, claim, new_fake_engine, new_job, running_bench
from tests.unit.decode.scheduling import BLOCK, land, make_request, new_scheduler
from worker.identity import Identity
from worker.roles import CancelReason
from worker.serving.turns import MOST_PASSED, Turns

LARGE = list(range(20, 68))  # twelve blocks of sixteen, and one for the next token
SMALL = list(range(10))  # three
ENDLESS = 10 * MOST_PASSED
FOUR_TOKENS = SamplingParams(max_tokens=4, temperature=0.0)


class Busy:
    """A worker with both roles. Two small leases at a time are open: a third fits, the large prompt does not."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.decode, self.prefill = DecodeRole(bench.context), PrefillRole(bench.context, max_requests=4)
        for role in (self.decode, self.prefill):
            bench.roles.attach(role, active=True)
        bench.peers.saw(msgspec.structs.replace(bench.state("p0"), features=frozenset(Feature)))
        self._open: list[tuple[Job, ReserveReply]] = []
        self._num_small = 0

    async def ask(self, job: Job) -> ReserveReply:
        context = self.bench.context
        question = Reserve(job=job, worker="p0", incarnation=1, remaining_ms=60_000, layout=context.cache.layout)
        reply = await self.decode.handle(question)
        assert isinstance(reply, ReserveReply)
        return reply

    async def small(self) -> bool:
        """One more asks for room."""
        self._num_small += 1
        job = new_job(f"small {self._num_small}", [self._num_small, *SMALL], FOUR_TOKENS, prefill=True)
        reply = await self.ask(job)
        if reply.granted:
            self._open.append((job, reply))
        return reply.granted

    async def end_oldest(self) -> None:
        """A small one is over."""
        if self._open:
            job, lease = self._open.pop(0)
            head = Identity("p0", 1).head(job)
            done = WriterDone(**head, lease_id=lease.lease_id, generation=lease.generation)
            assert await self.decode.handle(done) == Ack(known=True)

    async def plan(self) -> set[str]:
        """Compute a pass; who was in it."""
        planned = [(role, role.plan(64)) for role in (self.decode, self.prefill)]
        await settled()
        for role, chunks in planned:
            role.apply(list(zip(chunks, self.bench.engine.launch(chunks).wait(), strict=True)))
        await settled()
        return {chunk.sequence.request_id for _, chunks in planned for chunk in chunks}

    @property
    def whose_turn(self) -> list[str]:
        due = self.bench.context.cache.turns.due
        return [who.request_id if isinstance(who, Sequence) else who[1] for who in due]  # type: ignore[index]


@pytest.fixture
async def busy() -> AsyncIterator[Busy]:
    async with running_bench(new_fake_engine(16), token_budget=64, max_sequences=4) as bench:
        worker = Busy(bench)
        for _ in range(2):
            assert await worker.small()
        yield worker
        for role in (worker.decode, worker.prefill):
            await role.cancel_all(CancelReason.WORKER_STOPPED)
        await settled()
        await worker.decode.close()


@pytest.mark.parametrize("where", ["at its writer", "in the batch", "before its prompt"])
async def test_a_large_one_gets_in_although_small_ones_never_cease(busy: Busy, where: str) -> None:
    """Before it had turns, it waited for as long as they came."""
    asks = new_job("large", LARGE, FOUR_TOKENS, prefill=where != "in the batch")
    if where != "at its writer":
        role = busy.decode if where == "in the batch" else busy.prefill
        await role.start(claim(asks, busy.bench.gateway))

    passed = 0
    for _ in range(ENDLESS):
        is_in = (await busy.ask(asks)).granted if where == "at its writer" else "large" in await busy.plan()
        if is_in:
            break
        passed += await busy.small()
        await busy.end_oldest()
    assert (is_in, passed, busy.whose_turn) == (True, MOST_PASSED, [])


async def pass_often(busy: Busy, job: Job) -> None:
    """Have a writer ask in vain until it is its turn."""
    while busy.whose_turn != [job.request_id]:
        assert (await busy.ask(job)).reason is Refusal.FULL
        await busy.small()
        await busy.end_oldest()


ASKS = new_job("large", LARGE, FOUR_TOKENS, prefill=True)


@pytest.mark.parametrize("how", ["its writer takes it back", "its gateway cancels it", "it asks no more"])
async def test_nothing_is_kept_for_a_writer_that_asks_no_more(
    busy: Busy, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    await pass_often(busy, ASKS)
    assert not await busy.small()
    if how == "its writer takes it back":
        await busy.decode.handle(Cancel(request_id="large", attempt=1, worker="p0"))
    elif how == "its gateway cancels it":
        await busy.decode.handle(Cancel(request_id="large", attempt=1))
        assert (await busy.ask(ASKS)).reason is Refusal.CANCELLED
    else:
        monkeypatch.setattr(intake, "ASKED_AGAIN_S", -1.0)
        await busy.ask(ASKS)
        busy.bench.context.cache.turns.look_after(time.monotonic())
    assert busy.whose_turn == []
    assert await busy.small()


async def test_who_asks_again_still_waits_though_places_are_what_it_lacks_now(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "ASKED_AGAIN_S", -1.0)
    await busy.ask(ASKS)
    monkeypatch.undo()
    for name in ("c", "d"):
        assert (await busy.ask(new_job(name, [1], FOUR_TOKENS, prefill=True))).granted
    assert (await busy.ask(ASKS)).reason is Refusal.FULL

    busy.bench.context.cache.turns.look_after(time.monotonic())

    for small in range(MOST_PASSED):
        busy.bench.context.cache.turns.admitted(small)
    assert busy.whose_turn == ["large"]


async def test_the_worker_looks_after_who_asks_no_more(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = asyncio.Event()
    turns = busy.bench.context.cache.turns
    monkeypatch.setattr(turns, "_changed", changed.set)
    turns.waits("gone", blocks=1, passed=MOST_PASSED, until=0.0)
    await changed.wait()
    assert busy.whose_turn == []


@pytest.mark.parametrize("where", ["in the batch", "before its prompt"])
async def test_nothing_is_kept_for_a_request_that_is_over(busy: Busy, where: str) -> None:
    role = busy.decode if where == "in the batch" else busy.prefill
    await role.start(claim(msgspec.structs.replace(ASKS, decode_workers=["x"]), busy.bench.gateway))
    await busy.plan()
    for small in range(MOST_PASSED):
        busy.bench.context.cache.turns.admitted(small)
    assert not await busy.small()
    await role.handle(Cancel(request_id="large", attempt=1))
    await settled()
    assert busy.whose_turn == []
    assert await busy.small()


@pytest.mark.parametrize("passing", ["in the batch", "before its prompt"])
async def test_what_is_kept_is_kept_from_this_workers_own_prompts(busy: Busy, passing: str) -> None:
    await pass_often(busy, ASKS)
    role = busy.decode if passing == "in the batch" else busy.prefill
    await role.start(claim(new_job("small", SMALL[:3], FOUR_TOKENS, prefill=True), busy.bench.gateway))
    assert await busy.plan() == set()
    await busy.decode.handle(Cancel(request_id="large", attempt=1, worker="p0"))
    assert await busy.plan() == {"small"}


@pytest.mark.parametrize("where", ["at its writer", "before its prompt"])
async def test_whose_turn_it_is_leaves_no_room_for_those_who_wait_for_it(busy: Busy, where: str) -> None:
    """Three wait in the batch, which has four places, and would be left a block each."""
    if where == "at its writer":
        await pass_often(busy, ASKS)
    else:
        await busy.prefill.start(claim(ASKS, busy.bench.gateway))
        assert await busy.plan() == set()
        for small in range(MOST_PASSED):
            busy.bench.context.cache.turns.admitted(small)
    assert busy.whose_turn == ["large"]
    for name in "abc":
        await busy.decode.start(claim(new_job(name, LARGE, FOUR_TOKENS), busy.bench.gateway))

    await busy.end_oldest()  # now it fits, beside the other small one

    if where == "at its writer":
        assert await busy.plan() == set(), "others came later"
        assert (await busy.ask(ASKS)).granted
    else:
        assert await busy.plan() == {"large"}


# -- the batch ---------------------------------------------------------------------------------------------------------------


def test_who_was_passed_often_gives_way_last() -> None:
    scheduler, pool = new_scheduler(num_blocks=6)
    requests = [
        make_request("often", prompt=7, max_tokens=9, priority=-1),
        make_request("seldom", prompt=7, max_tokens=9, priority=1, salt=20),
    ]
    requests[0].passed = MOST_PASSED
    for request in requests:
        scheduler.enqueue(request)
    while scheduler.preemptions == 0:
        land(scheduler, pool, scheduler.plan(16))
    assert [request.id for request in scheduler.waiting] == ["seldom"]


def test_whose_turn_it_is_goes_before_one_that_gave_way_later() -> None:
    """It would wait for what is kept, and be in front of whom it is kept for."""
    turns = Turns()
    scheduler, pool = new_scheduler(num_blocks=8, turns=turns)
    running = [make_request(name, prompt=11, max_tokens=20, salt=20 * at) for at, name in enumerate("ab")]
    for request in running:
        scheduler.enqueue(request)
    land(scheduler, pool, scheduler.plan(32))
    large = make_request("large", prompt=6 * BLOCK, max_tokens=2, salt=50)
    scheduler.enqueue(large)
    while scheduler.preemptions == 0:
        land(scheduler, pool, scheduler.plan(32))
    assert [request.id for request in scheduler.waiting] == ["b", "large"]

    for small in range(MOST_PASSED):
        turns.admitted(small)
    scheduler.remove(running[0])

    assert {chunk.sequence.request_id for chunk in scheduler.plan(32)} == {"large"}
    assert (large.passed, [request.id for request in scheduler.waiting]) == (MOST_PASSED, ["b"])


def test_who_waits_behind_another_is_passed_as_well() -> None:
    turns = Turns()
    scheduler, pool = new_scheduler(num_blocks=6, turns=turns)
    pool.allocate(4)
    requests = [make_request(name, prompt=4 * BLOCK, max_tokens=2, salt=20 * at) for at, name in enumerate("ab")]
    for request in requests:
        scheduler.enqueue(request)
    assert scheduler.plan(32) == []
    for small in range(MOST_PASSED):
        turns.admitted(small)
    assert turns.due == [request.sequence for request in requests]


def test_passes_of_all_its_waits_count() -> None:
    turns = Turns()
    scheduler, pool = new_scheduler(num_blocks=6, turns=turns)
    requests = [make_request(name, prompt=7, max_tokens=9, salt=20 * at) for at, name in enumerate("ab")]
    requests[1].passed = MOST_PASSED - 1
    for request in requests:
        scheduler.enqueue(request)
    while scheduler.preemptions == 0:
        land(scheduler, pool, scheduler.plan(16))
    assert turns.due == []
    turns.admitted("small")
    assert turns.due == [requests[1].sequence]
