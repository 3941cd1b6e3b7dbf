"""One attempt after another: placed, queued, moved, given up, ended."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from common.blocks import unpack_tokens
from common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    QuarantinedError,
    UnavailableError,
)
from common.messages import Cancel, Feature, Grammar, Job, Keep, Received
from common.peers import Incarnation
from engine.grammars.following import Following
from gateway.lifecycle.attempts import REPLACE_PERIOD_S, Why
from gateway.lifecycle.running import MAX_UNNAMED_DEATHS, Death
from gateway.request.active import ActiveRequest
from gateway.request.ends import MAX_FAILED, MAX_HARMED, End, pause_s
from gateway.request.placement import Placement, Reason
from gateway.request.spec import Sharing
from gateway.request.state import CLEAR_AFTER_TOKENS, PROGRESS_TOKENS, Phase
from tests.unit.gateway.lifecycle.conftest import Gateway, answer_of

LOST = Why(end=End.REQUEST_LOST)
BY_REDIS = Placement(prefill="p1", decode=["d0"], reason=Reason.PREFIX, matched_blocks_prefill=2)


# -- begin -------------------------------------------------------------------------------------------------------------


async def test_a_request_is_placed_and_its_job_queued(gateway: Gateway) -> None:
    await gateway.fleet()
    gateway.ledger.placements = [BY_REDIS]
    request = await gateway.submit()
    [job] = gateway.jobs("p1")
    assert (job.request_id, job.attempt, job.gateway, job.decode_workers) == ("r", 1, "here", ["d0"])
    assert list(unpack_tokens(job.token_ids)) == request.state.spec.token_ids
    assert (request.state.assigned, request.state.candidates, request.work) == ("p1", ["d0"], 40 - 32)
    assert gateway.requests.seen.running.find("r") is request
    assert gateway.requests.counters["placed:prefix"] == 1
    assert [line.reason for line in request.timeline.attempts] == ["prefix"]
    assert gateway.ledger.charged == {("r", 1, "prefill"), ("r", 1, "decode")}


async def test_a_job_that_the_queue_refuses_is_an_error_and_leaves_nothing(gateway: Gateway) -> None:
    await gateway.fleet()
    gateway.ledger.placements = [BY_REDIS]
    gateway.bus.refusals = [OverloadedError("the queue is full", retry_after_s=1.0)]
    with pytest.raises(OverloadedError, match="the queue is full"):
        await gateway.submit()
    await gateway.idle()
    assert (len(gateway.requests.seen.running), gateway.requests.in_flight) == (0, 0)
    assert gateway.ledger.charged == set()
    assert not gateway.bus.queued


async def test_a_job_whose_answer_was_lost_is_an_error_unless_a_worker_has_it(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    gateway.bus.loses_answers = True
    gateway.bus.refusals = [UnavailableError("no answer")]
    with pytest.raises(UnavailableError):
        await gateway.submit("unclaimed")
    await gateway.idle()
    assert [cancel.request_id for cancel in p0.told(Cancel)] == ["unclaimed"]  # the job may be there, and is not wanted

    publish = gateway.bus.publish_job

    async def claimed_before_the_answer(worker: str, job: Job) -> int:
        number = await publish(worker, job)
        await p0.claim(next(iter(gateway.requests.seen.running)))
        raise UnavailableError(f"the answer for job {number} was lost")

    gateway.bus.publish_job = claimed_before_the_answer  # type: ignore[method-assign]
    request = await gateway.submit("claimed")
    assert request.state.phase is Phase.CLAIMED


async def test_all_choices_start_or_none(gateway: Gateway) -> None:
    await gateway.fleet()
    gateway.bus.refusals = []
    first = await gateway.submit("taken")
    with pytest.raises(InvalidRequestError, match="taken is running already"):
        await gateway.submit("taken")
    assert list(gateway.requests.seen.running) == [first]


async def test_a_request_that_cannot_be_queued_by_its_deadline_is_late(gateway: Gateway) -> None:
    await gateway.fleet()
    gateway.ledger.place = never  # type: ignore[method-assign,assignment]
    started_at = gateway.loop.now
    with pytest.raises(DeadlineExceededError, match="before it was queued"):
        await gateway.submit(deadline_s=3.0)
    assert (gateway.loop.now - started_at, len(gateway.requests.seen.running)) == (pytest.approx(3.0), 0)


async def never(*_: object) -> Placement:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


# -- move --------------------------------------------------------------------------------------------------------------


async def test_a_moved_request_goes_on_from_what_the_client_has(gateway: Gateway) -> None:
    p0, p1, _ = await gateway.fleet()
    gateway.ledger.placements = [Placement(prefill="p0", decode=["d0"], reason=Reason.LOAD)]
    request = await gateway.submit()
    await p0.claim(request)
    p0.send(request, 0, 100, 101)
    await gateway.requests.attempts.move(request, Why(end=End.UNANSWERED, blame="p0"))
    await gateway.idle()
    [job] = gateway.jobs("p1")
    assert (job.attempt, list(unpack_tokens(job.token_ids))[40:], job.num_prompt_tokens) == (2, [100, 101], 40)
    assert ("p0" in request.state.excluded, gateway.jobs("p0")) == (True, [])
    assert [(cancel.attempt, cancel.reason) for cancel in p0.told(Cancel)] == [(1, "retry")]
    assert gateway.ledger.charged == set()
    assert [line.outcome for line in request.timeline.attempts] == ["the worker doesn't answer", ""]
    assert gateway.requests.counters["retries"] == 1
    await p1.claim(request)
    p1.send(request, 2, 102, finish="stop")
    assert await answer_of(request) == [100, 101, 102]


CLOSING = Grammar(after=[7, 8], budget=0)


def next_allowed(job: Job, *generated: int) -> list[int]:
    """The tokens below 128 that the job's grammar lets come next."""
    assert job.grammar is not None
    following, mask = Following(job.grammar, job.sampling, None, []), np.zeros(4, np.uint32)
    following.follow(list(generated))
    following.complete(mask)
    return [token for token in range(128) if mask[token >> 5] >> np.uint32(token & 31) & 1]


async def thinking(gateway: Gateway, **changes: Any) -> ActiveRequest:
    """A request whose client has two tokens of reasoning."""
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        await gateway.worker(name, role, features=frozenset(Feature))
    return await gateway.decoding(**changes)


async def test_an_end_by_a_call_is_told_to_both_workers(gateway: Gateway) -> None:
    p0, _, d0 = await gateway.fleet()
    for keep, count in ((Keep(), 0), (Keep(call_ttl_s=60.0), 1)):
        request = await gateway.decoding(f"r{count}", sharing=Sharing("", "", keep))
        request.called()
        await gateway.idle()
        assert [sum(message.is_call for message in worker.told(Received)) for worker in (p0, d0)] == [count] * 2


@pytest.mark.parametrize("before", [None, Grammar(after=[7, 8], budget=15), Grammar(text="in it")], ids=str)
async def test_reasoning_that_is_ended_closes_in_an_attempt_that_goes_on(
    gateway: Gateway, before: Grammar | None
) -> None:
    request = await thinking(gateway, grammar=before)
    assert request.end_reasoning(CLOSING)
    await gateway.idle()
    [job] = [job for job in gateway.jobs("p0") if job.attempt == 2]
    assert job.grammar == Grammar(after=[7, 8], budget=2)
    assert (list(unpack_tokens(job.token_ids))[40:], job.num_prompt_tokens) == ([100, 101], 40)
    assert [next_allowed(job, *run) for run in ([100, 101], [100, 101, 7])] == [[7], [8]]
    assert len(next_allowed(job, 100, 101, 7, 8)) == 128
    assert gateway.requests.in_flight == 1
    assert [line.outcome for line in request.timeline.attempts] == ["its client ended the reasoning", ""]
    assert (gateway.requests.counters["retries"], gateway.requests.counters["reasoning_ended"]) == (0, 1)
    gateway.workers["d0"].send(request, 2, 99, attempt=1)  # too late
    await gateway.workers["p0"].claim(request)
    gateway.workers["p0"].send(request, 2, 7)
    gateway.workers["d0"].send(request, 3, 8)
    assert not request.end_reasoning(CLOSING)
    gateway.workers["d0"].send(request, 4, 50, finish="stop")
    assert await answer_of(request) == [100, 101, 7, 8, 50]
    await gateway.idle()
    assert (gateway.ledger.charged, gateway.requests.in_flight, request.state.attempt) == (set(), 0, 2)
    assert not request.end_reasoning(CLOSING)


async def test_reasoning_that_closes_already_is_not_moved_again(gateway: Gateway) -> None:
    request = await thinking(gateway)
    assert [request.end_reasoning(CLOSING), request.end_reasoning(CLOSING)] == [True, True]
    await gateway.idle()
    assert (request.state.attempt, request.state.failed) == (2, 0)
    for number in range(3, 5):  # the workers are lost meanwhile: what is forced stays so
        await gateway.requests.attempts.move(request, LOST)
        assert request.state.attempt == number
        assert request.job is not None
        assert request.job.grammar == Grammar(after=[7, 8], budget=2)
    assert request.end_reasoning(CLOSING)


async def test_reasoning_is_ended_while_the_request_is_being_moved(gateway: Gateway) -> None:
    request = await thinking(gateway)
    until = asyncio.get_running_loop().create_future()
    gateway.requests.attempts.preempt(request, until)
    await gateway.idle()
    assert request.end_reasoning(CLOSING)
    await gateway.idle()
    assert request.state.attempt == 1
    until.set_result(None)
    await gateway.idle()
    assert request.job is not None
    assert (request.job.attempt, request.job.grammar) == (2, Grammar(after=[7, 8], budget=2))


async def test_an_answer_with_a_grammar_waits_for_a_worker_that_follows_it(gateway: Gateway) -> None:
    """Moved to one of release 0.1.0, the rest of it would follow nothing."""
    follows = {"features": frozenset(Feature)}
    p0 = await gateway.worker("p0", "prefill", **follows)
    d0 = await gateway.worker("d0", "decode", **follows)
    for name, role in (("p1", "prefill"), ("d1", "decode")):
        await gateway.worker(name, role, features=frozenset())
    request = await gateway.decoding(grammar=Grammar(text='start: "yes"'))
    await d0.stop()
    await gateway.idle()
    assert (request.state.attempt > 1, gateway.bus.queued) == (True, {})
    await gateway.worker("d2", "decode", **follows)
    await asyncio.sleep(2 * REPLACE_PERIOD_S)
    [job] = gateway.jobs("p0")
    assert (job.decode_workers, job.grammar, gateway.jobs("p1")) == (["d2"], request.state.spec.grammar, [])
    assert (await p0.claim(request)).granted
    request.cancel("the client left")


async def test_a_request_that_nobody_can_take_is_placed_again_and_again(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    gateway.bus.refusals = [UnavailableError("no answer") for _ in range(MAX_FAILED + 2)]
    started_at = gateway.loop.now
    await gateway.requests.attempts.move(request, LOST)
    assert gateway.loop.now - started_at == pytest.approx((MAX_FAILED + 2) * REPLACE_PERIOD_S)
    assert (request.state.attempt, request.state.failed) == (MAX_FAILED + 4, 1)  # who isn't queued has not failed
    assert [job.attempt for _, job in gateway.bus.queued.values()] == [MAX_FAILED + 4]


async def test_a_worker_lost_while_its_job_was_being_queued_is_not_waited_for(gateway: Gateway) -> None:
    await gateway.fleet()
    request, attempts, publish = await gateway.submit(), gateway.requests.attempts, gateway.bus.publish_job

    async def lost_meanwhile(worker: str, job: Job) -> int:
        gateway.bus.publish_job = publish  # type: ignore[method-assign]
        await attempts.move(request, LOST)
        return await publish(worker, job)

    gateway.bus.publish_job = lost_meanwhile  # type: ignore[method-assign]
    await attempts.move(request, LOST)
    await gateway.idle()
    assert request.state.attempt == 3
    assert [job.attempt for _, job in gateway.bus.queued.values()] == [3]


async def test_attempts_end_and_the_job_is_kept_for_whoever_looks_into_it(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    for _ in range(MAX_HARMED):
        await gateway.requests.attempts.move(request, Why(end=End.PASS_FAILED, detail="it failed"))
    await gateway.idle()
    with pytest.raises(QuarantinedError, match="given up: 3 passes with it failed; last: it failed"):
        await answer_of(request)
    [(_, job, reason)] = gateway.bus.buried
    assert (job.request_id, reason) == ("r", "3 passes with it failed; last: it failed")
    assert (gateway.bus.queued, gateway.requests.counters["quarantined"]) == ({}, 1)
    assert gateway.requests.in_flight == 0


async def test_a_pass_that_failed_makes_a_suspect_until_it_got_further(gateway: Gateway) -> None:
    """Whose pass fails for another request's sake is computed alone next, and cleared."""
    await gateway.fleet()
    request = await gateway.submit()
    await gateway.requests.attempts.move(request, Why(end=End.PASS_FAILED))
    assert [job.suspect_until for _, job in gateway.bus.queued.values()] == [CLEAR_AFTER_TOKENS]
    worker = gateway.workers[request.state.assigned]
    await worker.claim(request)
    worker.send(request, 0, *range(100, 100 + CLEAR_AFTER_TOKENS))
    assert (request.state.harmed, request.state.is_suspect) == (0, False)


async def test_a_way_that_fails_again_and_again_is_no_quarantine(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    started_at = gateway.loop.now
    for _ in range(MAX_FAILED):
        await gateway.requests.attempts.move(request, Why(end=End.WORKER_FAILED, detail="no link"))
    with pytest.raises(UnavailableError, match="10 attempts failed on their way; last: no link"):
        await answer_of(request)
    assert gateway.bus.buried == []
    assert gateway.requests.counters["given_up"] == 1
    assert gateway.loop.now - started_at == pytest.approx(
        sum(pause_s(End.WORKER_FAILED, number) for number in range(1, MAX_FAILED))
    )


async def test_progress_begins_the_count_again(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    for number in range(2 * MAX_FAILED):
        worker = gateway.workers[request.state.assigned]
        await worker.claim(request)
        worker.send(request, number * PROGRESS_TOKENS, *range(PROGRESS_TOKENS))
        await gateway.requests.attempts.move(request, Why(end=End.UNANSWERED))
    assert (request.state.is_over, request.state.failed) == (False, 1)


async def test_attempts_that_nobody_tried_do_not_count(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    for _ in range(3 * MAX_FAILED):
        await gateway.requests.attempts.move(request, Why(end=End.ROLE_LOST))
    assert (request.state.failed, request.state.harmed, request.state.is_over) == (0, 0, False)


async def test_a_request_that_killed_its_workers_is_given_up(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    for number in range(MAX_UNNAMED_DEATHS):
        death = Death(Incarnation("p0", number), others=0)
        await gateway.requests.attempts.move(request, Why(end=End.WORKER_LOST, death=death))
    with pytest.raises(QuarantinedError, match="3 workers died of it"):
        await answer_of(request)


async def test_a_request_that_is_over_does_not_move(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    request.cancel("the client left")
    await gateway.requests.attempts.move(request, LOST)
    assert (request.state.attempt, gateway.requests.counters["retries"]) == (1, 0)


async def test_a_job_in_the_queue_of_a_worker_that_lost_its_role_is_taken_back(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    request = await gateway.submit()
    assert request.state.assigned == "p0"
    await p0.beat(roles=["decode"])
    await gateway.idle()
    assert (request.state.assigned, request.state.attempt, request.state.failed) == ("p1", 2, 0)
    assert gateway.jobs("p0") == []


async def test_a_role_that_was_lost_while_the_job_was_being_queued_is_seen_afterwards(gateway: Gateway) -> None:
    await gateway.fleet()
    request, publish = await gateway.submit(), gateway.bus.publish_job

    async def changing_its_role_meanwhile(worker: str, job: Job) -> int:
        gateway.bus.publish_job = publish  # type: ignore[method-assign]
        await gateway.workers[worker].beat(status="draining")
        return await publish(worker, job)

    gateway.bus.publish_job = changing_its_role_meanwhile  # type: ignore[method-assign]
    await gateway.requests.attempts.move(request, Why(end=End.WORKER_FAILED, detail="it failed"))
    await gateway.idle()
    outcomes = [line.outcome for line in request.timeline.attempts]
    assert outcomes == ["it failed", "p0 takes no such work any more", ""]
    assert (request.state.assigned, request.state.failed) == ("p1", 1)


async def test_jobs_that_nobody_began_are_queued_again_after_the_bus_was_lost(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    waits, kept = await gateway.submit("waits"), await gateway.decoding("kept")
    gateway.bus.forget_jobs()
    await gateway.requests.attempts.queue_again()
    [(number, (worker, job))] = gateway.bus.queued.items()
    assert (worker, job.request_id, job.attempt, waits.stream_seq) == (waits.state.assigned, "waits", 1, number)
    await gateway.requests.attempts.queue_again()  # a server that kept it stores it once
    assert list(gateway.bus.queued) == [number]
    assert (kept.state.attempt, p0.told(Cancel)) == (1, [])


async def test_a_job_that_cannot_be_queued_again_moves(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    gateway.bus.refusals = [OverloadedError("the queue is full", retry_after_s=1.0)]
    await gateway.requests.attempts.queue_again()
    await gateway.idle()
    assert [line.outcome for line in request.timeline.attempts] == ["the bus was lost", ""]
    assert [job.attempt for _, job in gateway.bus.queued.values()] == [2]


# -- end ---------------------------------------------------------------------------------------------------------------


async def test_an_end_wakes_the_reader_and_gives_everything_back(gateway: Gateway) -> None:
    _, p1, d0 = await gateway.fleet()
    gateway.ledger.placements = [BY_REDIS]
    request = await gateway.decoding()
    d0.send(request, 2, 102, finish="length")
    assert await answer_of(request) == [100, 101, 102]
    await gateway.idle()
    assert (gateway.ledger.charged, gateway.requests.in_flight, len(gateway.requests.seen.running)) == (set(), 0, 0)
    assert (p1.told(Cancel), d0.told(Cancel)) == ([], [])
    assert request.timeline.status == "length"


async def test_a_client_that_leaves_stops_both_workers(gateway: Gateway) -> None:
    p0, p1, d0 = await gateway.fleet()
    request = await gateway.decoding()
    request.cancel("the client left")
    request.cancel("the client left")
    await gateway.idle()
    assert [cancel.reason for cancel in (*p0.told(Cancel), *p1.told(Cancel))] == ["the client left"]
    assert [cancel.attempt for cancel in d0.told(Cancel)] == [1]
    assert gateway.requests.in_flight == 0
    assert await answer_of(request) == [100, 101]


async def test_a_waiting_job_of_a_client_that_leaves_is_taken_out_of_the_queue(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    request.cancel("the client left")
    await gateway.idle()
    assert gateway.bus.queued == {}
