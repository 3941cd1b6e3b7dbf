"""The prefill role while passes overlap: what it plans, what its handoff may see, and when its blocks go back."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator

import msgspec
import pytest

from common.messages import (
    Ack,
    Cancel,
    Grammar,
    Job,
    LeaseAborted,
    Reserve,
    ReserveReply,
    SamplingParams,
    ToWorker,
    WriterDone,
)
from common.words import Refusal
from decode.role import DecodeRole
from engine.engine import Chunk, Sampled
from prefill import reserving
from prefill.request import PrefillRequest
from prefill.role import PrefillRole
from prefill.stop import Stop
from tests.fakes.device import settled
from tests.fakes.worker import (
    BLOCK,
    GATEWAY,
    Bench,
    claim,
    grammars_built,
    new_fake_engine,
    new_job,
    running_bench,
    slow_grammars,
)
from worker.serving import twins

PROMPT = list(range(20, 40))  # five blocks
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)  # a request that ends with its prefill needs no decode worker


class Prefill:
    """The role with one request, and passes that the test gives results to."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.engine, self.pool = bench, bench.engine, bench.pool
        self.streams, self.ended = bench.gateway.streams, bench.gateway.ended
        self.role = PrefillRole(bench.context, max_requests=4)

    async def start(self) -> PrefillRequest:
        await self.claim(new_job("r", PROMPT, ONE_TOKEN, prefill=True))
        await settled()
        return self.role.requests[0]

    async def claim(self, job: Job) -> None:
        await self.role.start(claim(job, self.bench.gateway))

    def launch(self, budget: int = 8) -> list[tuple[Chunk, Sampled | None]]:
        """Plan and compute a pass; its results are for `apply`."""
        chunks = self.role.plan(budget)
        return list(zip(chunks, self.engine.launch(chunks).wait(), strict=True))

    async def end(self) -> None:
        """Leave no task behind, also when a test fails with passes in flight."""
        serving = self.role.serving
        for request in serving:
            while self.role.blocks.in_use(request.sequence):
                self.role.blocks.landed(request.sequence)
            request.stop(Stop.WORKER_STOPPED)
        await asyncio.gather(*serving.values())


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    async with running_bench(new_fake_engine(16)) as bench:
        prefill = Prefill(bench)
        yield prefill
        await prefill.end()


def another_attempt(attempt: int) -> Job:
    return msgspec.structs.replace(new_job("r", PROMPT, ONE_TOKEN, prefill=True), attempt=attempt)


async def test_the_next_chunk_is_planned_while_the_one_before_is_in_flight(prefill: Prefill) -> None:
    request = await prefill.start()

    first, second = prefill.launch(), prefill.launch()

    assert [(chunk.start, chunk.num_tokens) for chunk, _ in first + second] == [(0, 8), (8, 8)]
    assert request.sequence.num_computed == 0  # what the handoff pushes from
    prefill.role.apply(first)
    assert request.sequence.num_computed == 8
    assert len(request.sequence.digests) == 8 // BLOCK  # a block that is being computed is nobody else's yet
    prefill.role.apply(second)
    assert request.sequence.num_computed == 16


async def test_the_first_token_comes_when_its_pass_ends_and_nothing_is_planned_behind_it(prefill: Prefill) -> None:
    await prefill.start()
    first, last = prefill.launch(16), prefill.launch(16)

    assert prefill.role.plan(8) == []
    prefill.role.apply(first)
    await settled()
    assert prefill.streams == {}
    prefill.role.apply(last)
    await settled()
    assert prefill.streams["r"] == prefill.engine.expected(PROMPT, 1, ONE_TOKEN)
    assert prefill.ended["r"] == "length"
    assert prefill.pool.num_used == 0
    assert prefill.role.idle()


async def test_the_first_token_is_sent_before_the_handoff_goes_on(prefill: Prefill) -> None:
    """Starting the last push holds the thread, and the client waits for the token."""
    request = await prefill.start()
    first, last = prefill.launch(16), prefill.launch(16)
    prefill.role.apply(first)
    await settled()
    woken: list[bool] = []
    prefill.bench.gateway.on_frame = lambda: woken.append(request.changed.is_set())

    prefill.role.apply(last)
    await settled()

    assert woken == [False]
    assert prefill.streams["r"]
    assert prefill.ended["r"] == "length"  # which the handoff sees when it is woken


async def test_who_was_asked_for_room_is_told_when_the_request_ends_before_the_answer(prefill: Prefill) -> None:
    """Its lease would be held until the deadline: the answer comes to nobody. Seed 8786 of the simulation."""
    asked: list[ToWorker] = []

    async def answer(message: ToWorker) -> Ack:
        asked.append(message)
        if isinstance(message, Reserve):
            await asyncio.Future()
        return Ack(known=True)

    await prefill.bench.serve("elsewhere", answer)
    [stop] = prefill.engine.expected(PROMPT, 1, ONE_TOKEN)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, stop_token_ids=[stop])
    await prefill.claim(new_job("r", PROMPT, sampling, prefill=True))
    await settled()
    for results in (prefill.launch(16), prefill.launch(16)):
        prefill.role.apply(results)
        await settled()

    assert prefill.ended["r"] == "stop"
    assert [type(message) for message in asked] == [Reserve, Cancel]
    assert prefill.pool.num_used == 0


async def test_room_elsewhere_is_asked_for_once_the_prompt_has_its_blocks_here(prefill: Prefill) -> None:
    """Else one prompt could have room there and wait for blocks here, and another the other way round. Seed 617157, once."""
    asked: list[str] = []

    async def answer(message: ToWorker) -> Ack:
        if isinstance(message, Reserve):
            asked.append(message.job.request_id)
            await asyncio.Future()
        return Ack(known=True)

    await prefill.bench.serve("elsewhere", answer)
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    for name, prompt in (("long", list(range(52))), ("short", list(range(60, 76)))):  # 13 blocks of 16, and four
        await prefill.claim(new_job(name, prompt, sampling, prefill=True))
    in_flight = prefill.launch()
    await settled()
    assert asked == ["long"]

    await prefill.role.handle(Cancel(request_id="long", attempt=1))
    prefill.role.apply(in_flight)
    await settled()
    in_flight = prefill.launch()
    await settled()
    assert asked == ["long", "short"]
    await prefill.role.handle(Cancel(request_id="short", attempt=1))
    prefill.role.apply(in_flight)
    await settled()


@pytest.mark.parametrize(("decoding", "admitted"), [(1, ["first", "second"]), (2, ["first"])])
async def test_a_worker_that_decodes_too_has_a_block_left_for_who_is_handed_over_next(
    prefill: Prefill, decoding: int, admitted: list[str]
) -> None:
    """Else one of them would give way as soon as it grows."""
    await decode_too(prefill, decoding)
    for name, num_blocks in (("first", 5), ("second", 9)):
        await prefill.claim(new_job(name, [7] * (num_blocks * BLOCK), ONE_TOKEN, prefill=True))
    prefill.role.plan(0)  # of 16 blocks 2 would be left: one for the next, one for each that is decoded

    assert [request.id for request in prefill.role.requests if request.admitted] == admitted


async def decode_too(prefill: Prefill, sequences: int) -> None:
    """Give the worker a decode role with so many sequences that hold no blocks yet."""
    decode = DecodeRole(prefill.bench.context)
    prefill.bench.roles.attach(decode, active=True)
    prefill.bench.roles.attach(prefill.role, active=True)
    for number in range(sequences):
        await decode.start(claim(new_job(f"decoding {number}", [1, 2], ONE_TOKEN), prefill.bench.gateway))


async def test_who_finds_all_blocks_free_may_take_them_all() -> None:
    async with running_bench(new_fake_engine(16, max_model_len=64)) as bench:
        prefill = Prefill(bench)
        await decode_too(prefill, 0)
        await prefill.claim(new_job("r", list(range(16 * BLOCK - 1)), ONE_TOKEN, prefill=True))
        prefill.role.plan(0)

        assert prefill.pool.num_free == 0
        await prefill.end()


async def test_nobody_waits_for_anothers_grammar(prefill: Prefill) -> None:
    """One that takes seconds to build would keep all other tenants' jobs in the queue."""
    hard = msgspec.structs.replace(
        new_job("hard", [7] * (14 * BLOCK), ONE_TOKEN, prefill=True), grammar=Grammar(allowed=[1])
    )
    with slow_grammars(prefill.bench):
        await prefill.claim(hard)
        assert prefill.role.room() == 3
        await prefill.start()
        assert prefill.role.room() == 0  # until this one has its blocks
        prefill.role.plan(0)
        assert prefill.role.room() == 2
    await grammars_built(prefill.bench)
    prefill.role.plan(0)
    assert prefill.role.room() == 0, "it is built, and waits for blocks"


@pytest.mark.parametrize("teller", ["a candidate", "the gateway", "nobody"])
async def test_who_waits_for_room_hears_that_its_attempt_is_over(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch, teller: str
) -> None:
    """It may have been cut off when its gateway said so; else it would ask, and hold its blocks, until its deadline."""
    told, rounds, gateway = asyncio.Event(), 0, prefill.bench.gateway

    async def answer(message: ToWorker, *, cancelled: bool = False) -> ReserveReply | Ack:
        nonlocal rounds
        if not isinstance(message, Reserve):
            return Ack(known=True)
        rounds += 1
        if rounds > 5:
            told.set()
        if teller == "the gateway" and rounds > 2:
            gateway.unwanted.add("r")
        said = cancelled and teller == "a candidate" and rounds > 3
        return ReserveReply(granted=False, reason=Refusal.CANCELLED if said else Refusal.FULL)

    await prefill.bench.serve("elsewhere", answer)
    await prefill.bench.serve("other", functools.partial(answer, cancelled=True))
    monkeypatch.setattr(reserving, "WANTED_CHECK_S", 0.0)
    monkeypatch.setattr(reserving, "ASK_AGAIN_S", 0.0)
    job = new_job("r", PROMPT, SamplingParams(max_tokens=4, temperature=0.0), prefill=True)
    job = msgspec.structs.replace(job, decode_workers=["elsewhere", "other"])
    await prefill.claim(job)
    prefill.role.apply(prefill.launch())
    [serving] = prefill.role.serving.values()
    if teller == "nobody":
        await told.wait()
        assert prefill.ended == {}
        await prefill.role.handle(Cancel(request_id="r", attempt=1))
    await serving
    assert prefill.ended == {"r": "dropped"}
    assert prefill.pool.num_used == 0


@pytest.mark.parametrize(("cancelled", "left"), [(0, [3]), (2, [3]), (3, [])])
async def test_newer_attempts_leave_the_newest(prefill: Prefill, cancelled: int, left: list[int]) -> None:
    """While passes with the older ones are in flight. One was forgotten with its blocks still to come. Seed 508229, once."""
    await prefill.start()
    in_flight = [prefill.launch()]
    for attempt in (2, 3):
        await prefill.claim(another_attempt(attempt))
        await settled()
        in_flight.append(prefill.launch())
    assert [chunk.sequence.attempt for [(chunk, _)] in in_flight] == [1, 2, 3], "a newer attempt doesn't wait"
    if cancelled:
        await prefill.role.handle(Cancel(request_id="r", attempt=cancelled))
    for results in in_flight:
        prefill.role.apply(results)
    await settled()
    assert [request.job.attempt for request in prefill.role.serving] == left
    assert [request.job.attempt for request in prefill.role.requests] == left
    assert prefill.pool.num_used == len(PROMPT) // BLOCK * len(left)


@pytest.mark.parametrize(("gateway", "served"), [("another", 1), (GATEWAY, 0)])
async def test_a_cancellation_before_its_job_counts_for_its_own_gateway_alone(
    prefill: Prefill, gateway: str, served: int
) -> None:
    await prefill.role.handle(Cancel(request_id="r", attempt=1, gateway=gateway))
    await prefill.claim(another_attempt(1))
    await settled()
    assert len(prefill.role.requests) == served


async def test_a_lease_of_an_older_attempt_is_given_up_when_its_push_is_over(prefill: Prefill) -> None:
    """Its receiver gives the blocks to others then; a newer attempt of the request is no reason to say so before."""
    request = await prefill.start()
    in_flight = prefill.launch()
    await prefill.claim(another_attempt(2))
    aborted = LeaseAborted(
        request_id="r", attempt=1, worker="decode", incarnation=1, lease_id=7, generation=1, reason="expired"
    )

    await prefill.role.handle(aborted)
    assert prefill.bench.said(WriterDone) == []
    assert request.stopped
    prefill.role.apply(in_flight)
    await settled()
    await prefill.role.handle(aborted)
    assert len(prefill.bench.said(WriterDone)) == 1


@pytest.mark.parametrize("end", ["apply", "failed"])
async def test_a_cancelled_prompt_keeps_its_blocks_until_both_its_passes_are_over(prefill: Prefill, end: str) -> None:
    await prefill.start()
    passes = [prefill.launch(), prefill.launch()]

    await prefill.role.handle(Cancel(request_id="r", attempt=1))

    for results in passes:
        await settled()
        assert prefill.pool.num_used == len(PROMPT) // BLOCK
        if end == "apply":
            prefill.role.apply(results)
        else:
            prefill.role.failed([chunk for chunk, _ in results], RuntimeError("lost"))
    await settled()
    assert prefill.pool.num_used == 0
    assert prefill.ended["r"] == "dropped"
    assert prefill.pool.num_cached == 0  # nothing was published after the cancellation


async def test_a_failed_pass_fails_the_request_once_the_next_is_over_too(prefill: Prefill) -> None:
    await prefill.start()
    first, second = prefill.launch(), prefill.launch()

    prefill.role.failed([chunk for chunk, _ in first], RuntimeError("lost"))
    await settled()
    assert prefill.role.plan(8) == []
    assert prefill.pool.num_used == len(PROMPT) // BLOCK
    prefill.role.failed([chunk for chunk, _ in second], RuntimeError("lost"))
    await settled()
    assert prefill.ended["r"] == "step failed: RuntimeError"
    assert prefill.pool.num_used == 0


async def test_a_prompt_past_its_deadline_is_stopped_with_its_passes_in_flight(prefill: Prefill) -> None:
    request = await prefill.start()
    first = prefill.launch()
    request.claimed.deadline_at = 0.0

    assert prefill.role.plan(8) == []
    await settled()
    assert prefill.pool.num_used == len(PROMPT) // BLOCK
    prefill.role.apply(first)
    await settled()
    assert prefill.pool.num_used == 0


async def test_a_prompt_without_finite_logits_leaves_nothing_in_the_prefix_cache(prefill: Prefill) -> None:
    """Its blocks may be what was wrong: whoever matched them would fail as well, and so on for ever."""
    await prefill.start()
    first, last = prefill.launch(16), prefill.launch(16)

    prefill.role.apply(first)
    assert prefill.pool.cached_digests()
    prefill.role.apply([(chunk, None) for chunk, _ in last])
    await settled()
    assert prefill.ended["r"] == "step failed: no finite logits"
    assert prefill.pool.cached_digests() == []
    assert prefill.pool.num_free == 16


async def test_choices_of_a_prompt_are_what_they_would_be_alone_and_it_is_computed_once(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "LEAST_SHARED", 2 * BLOCK)
    drawn = {f"c{seed}": SamplingParams(max_tokens=1, temperature=1.0, seed=seed) for seed in range(3)}
    for name, sampling in drawn.items():
        await prefill.claim(new_job(name, PROMPT, sampling, prefill=True))
    count = 0
    while results := prefill.launch(64):
        assert prefill.role.room() == 4 - len(prefill.role.serving)  # who waits for a twin keeps nobody out
        count += sum(chunk.num_tokens for chunk, _ in results)
        prefill.role.apply(results)
        await settled()
    assert count == len(PROMPT) + 2 * BLOCK
    assert prefill.streams == {name: prefill.engine.expected(PROMPT, 1, sampling) for name, sampling in drawn.items()}
    assert prefill.ended == dict.fromkeys(drawn, "length")
