"""What time brings, with the watchdog running in virtual time: seconds pass in no time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from common import subjects
from common.errors import DeadlineExceededError, UnavailableError
from common.messages import Cancel, GatewayState, Resend, Trying
from gateway.lifecycle.probes import MAX_PROBES, TRIAL_PROBES
from gateway.lifecycle.silence import Patience
from gateway.lifecycle.watchdog import RECONNECT_GRACE_S, STALL_S, WATCH_PERIOD_S
from gateway.request.active import ActiveRequest
from gateway.request.spec import Aim
from gateway.request.state import Phase
from tests.unit.gateway.lifecycle.conftest import FakeWorker, Gateway, answer_of

WAIT = Patience()
LOOK_S = 2 * WATCH_PERIOD_S  # until the watchdog has looked for certain


@pytest.fixture
async def watched(gateway: Gateway) -> AsyncIterator[Gateway]:
    """With everything running."""
    await gateway.requests.start()
    yield gateway
    await gateway.requests.close()


def asked_for(worker: FakeWorker, request: ActiveRequest) -> list[int]:
    """The positions from which the worker was asked for the request's tokens."""
    name = request.state.spec.request_id
    return [resend.position for resend in worker.told(Resend) if resend.request_id == name]


# -- deadlines ---------------------------------------------------------------------------------------------------------


async def test_a_request_ends_at_its_deadline_on_all_its_workers(watched: Gateway) -> None:
    _, _, d0 = await watched.fleet()
    request = await watched.decoding(deadline_s=0.5)
    with pytest.raises(DeadlineExceededError, match="deadline passed"):
        await answer_of(request)
    assert watched.requests.in_flight == 0
    await watched.idle()
    assert [message.reason for message in d0.heard if not isinstance(message, Resend)] == ["deadline"]


async def test_a_first_token_that_comes_too_late_for_its_client_is_not_waited_for(watched: Gateway) -> None:
    await watched.fleet()
    late, in_time = (
        await watched.submit("late", aim=Aim(first_token_s=1.0)),
        await watched.decoding("b", aim=Aim(first_token_s=1.0)),
    )
    with pytest.raises(DeadlineExceededError, match="first token did not come in time"):
        await answer_of(late)
    assert not in_time.state.is_over


# -- one row of the table each -------------------------------------------------------------------------------------------


async def test_a_silent_stream_is_asked_for_and_goes_on(watched: Gateway) -> None:
    _, _, d0 = await watched.fleet()
    request = await watched.decoding()
    await asyncio.sleep(WAIT.decoding_s + LOOK_S)
    assert asked_for(d0, request) == [2]
    assert request.state.attempt == 1
    d0.send(request, 2, 102, finish="stop")
    assert await answer_of(request) == [100, 101, 102]


async def test_who_waits_for_a_decode_worker_waits_until_its_deadline(watched: Gateway) -> None:
    """It was given up after three times 15 s, as if it had killed somebody, to clients that had their first token."""
    p0, p1, _ = await watched.fleet()
    request = await watched.submit(deadline_s=180.0)
    worker = p0 if request.state.assigned == "p0" else p1
    await worker.claim(request)
    worker.send(request, 0, 100)
    worker.knows.add("r")
    worker.is_out_of_room = True
    await asyncio.sleep(175.0)
    assert (request.state.attempt, request.state.phase, request.place.waits) == (1, Phase.PREFILLED, True)
    with pytest.raises(DeadlineExceededError, match="deadline passed"):
        await answer_of(request)


async def test_a_job_in_a_long_queue_is_not_given_up(watched: Gateway) -> None:
    """It moves to another queue, each time after twice as long, and that is no failed attempt."""
    await watched.fleet()
    request = await watched.submit(deadline_s=180.0)
    await asyncio.sleep(175.0)
    assert {line.outcome for line in request.timeline.attempts} == {"not claimed", ""}
    assert (request.state.attempt, request.state.failed, request.state.is_over) == (5, 0, False)


async def test_a_stream_that_its_worker_does_not_know_moves(watched: Gateway) -> None:
    _, _, d0 = await watched.fleet()
    await watched.worker("d1", "decode")
    request = await watched.decoding()
    d0.knows.clear()
    await asyncio.sleep(WAIT.decoding_s + LOOK_S)
    assert [line.outcome for line in request.timeline.attempts] == ["the worker lost the request", ""]
    assert (request.state.excluded, request.state.deaths) == (["d0"], 0)


async def test_a_decode_worker_that_answers_nobody_convicts_nobody(watched: Gateway) -> None:
    """Its heartbeats come, and it may be alive: the request moves, as a suspect."""
    _, _, d0 = await watched.fleet()
    await watched.worker("d1", "decode")
    request = await watched.decoding()
    watched.bus.deaf.add(d0.subject)
    await asyncio.sleep(WAIT.decoding_s + MAX_PROBES * LOOK_S)
    assert len(asked_for(d0, request)) == MAX_PROBES
    assert [line.outcome for line in request.timeline.attempts] == ["the worker doesn't answer", ""]
    assert (request.state.is_suspect, request.state.is_over) == (True, False)


async def test_a_worker_that_tries_a_suspect_gets_more_patience(watched: Gateway) -> None:
    _, _, d0 = await watched.fleet()
    await watched.worker("d1", "decode")
    request = await watched.decoding()
    await d0.say(Trying, request)
    watched.bus.deaf.add(d0.subject)
    await asyncio.sleep(WAIT.decoding_s + (TRIAL_PROBES - 2) * WATCH_PERIOD_S)
    assert (len(asked_for(d0, request)) > MAX_PROBES, request.state.attempt) == (True, 1)
    await asyncio.sleep(4 * WATCH_PERIOD_S)
    assert (len(asked_for(d0, request)), request.state.attempt) == (TRIAL_PROBES, 2)


async def test_missing_tokens_are_asked_for_and_then_given_up(watched: Gateway) -> None:
    _, _, d0 = await watched.fleet()
    request = await watched.decoding()
    d0.send(request, 4, 104)
    await asyncio.sleep(WAIT.gap_resend_s + LOOK_S)
    assert asked_for(d0, request)[0] == 2
    for _ in range(60):  # other tokens come, so that the stream is not silent
        await asyncio.sleep(WATCH_PERIOD_S)
        if request.state.attempt == 1:
            d0.send(request, 4, 104)
    assert [line.outcome for line in request.timeline.attempts] == ["tokens are missing", ""]


async def test_a_claimed_request_without_a_word_is_asked_for(watched: Gateway) -> None:
    p0, _, _ = await watched.fleet()
    request = await watched.submit()
    await p0.claim(request)
    p0.knows.add("r")
    await asyncio.sleep(WAIT.claimed_s + LOOK_S)
    assert asked_for(p0, request) == [0]
    await asyncio.sleep(WAIT.claimed_s - LOOK_S)
    assert asked_for(p0, request) == [0]  # it said that it has it
    p0.knows.clear()
    await asyncio.sleep(2 * LOOK_S)
    assert [line.outcome for line in request.timeline.attempts] == ["the worker lost the request", ""]


async def test_a_sequence_that_nobody_takes_over_moves(watched: Gateway) -> None:
    p0, _, _ = await watched.fleet()
    request = await watched.submit()
    await p0.claim(request)
    p0.knows.add("r")
    p0.send(request, 0, 100)
    await asyncio.sleep(WAIT.handoff_s - LOOK_S)
    assert (request.state.phase, request.state.attempt) == (Phase.PREFILLED, 1)
    await asyncio.sleep(2 * LOOK_S)
    assert [line.outcome for line in request.timeline.attempts] == ["nobody took the sequence over", ""]


async def test_an_unclaimed_job_moves_to_another_worker_if_there_is_one(watched: Gateway) -> None:
    await watched.worker("d0", "decode")
    await watched.worker("p0", "prefill")
    request = await watched.submit()
    await asyncio.sleep(WAIT.unclaimed_s + LOOK_S)
    assert request.state.attempt == 1  # where else?
    await watched.worker("p1", "prefill")
    await asyncio.sleep(LOOK_S)
    assert (request.state.attempt, request.state.assigned, request.state.excluded) == (2, "p1", ["p0"])


async def test_a_job_that_the_queue_gave_up_is_queued_again(watched: Gateway) -> None:
    await watched.worker("d0", "decode")
    await watched.worker("p0", "prefill")
    request = await watched.submit()
    await asyncio.sleep(WAIT.job_check_s + LOOK_S)
    assert request.state.attempt == 1  # it is there
    watched.bus.forget_jobs()
    await asyncio.sleep(WAIT.job_check_s + LOOK_S)
    assert [line.outcome for line in request.timeline.attempts] == ["the queue gave the job up", ""]
    assert [job.attempt for job in watched.jobs("p0")] == [2]


async def test_nobody_is_asked_twice_at_the_same_time(watched: Gateway) -> None:
    _, _, d0 = await watched.fleet()
    request = await watched.decoding()
    request.probing = True
    await asyncio.sleep(2 * WAIT.decoding_s)
    assert asked_for(d0, request) == []


# -- workers, the bus, and this process ----------------------------------------------------------------------------------


async def test_a_worker_that_is_gone_loses_everything_within_a_second(watched: Gateway) -> None:
    _, _, d0 = await watched.fleet()
    await watched.worker("d1", "decode")
    requests = [await watched.decoding(name) for name in ("a", "b", "c")]
    await d0.die()
    await asyncio.sleep(0.25 + 0.3 + 3 * WATCH_PERIOD_S)
    assert [[line.outcome for line in one.timeline.attempts] for one in requests] == [["the worker is gone", ""]] * 3
    assert watched.requests.counters["workers_lost"] == 1
    assert all(one.state.is_suspect for one in requests)
    assert "d0" not in watched.peers.states


async def test_while_the_bus_is_away_nobody_is_lost_and_then_workers_have_time_to_come_back(watched: Gateway) -> None:
    p0, _, d0 = await watched.fleet()
    request = await watched.decoding()
    watched.bus.connected = False
    await asyncio.sleep(2.0)
    await d0.die()
    watched.bus.connected, watched.bus.reconnects = True, 1
    await asyncio.sleep(RECONNECT_GRACE_S - 0.5)
    assert request.state.attempt == 1
    await watched.worker("d0", "decode")
    assert (request.state.attempt, p0.told(Cancel)) == (1, [])


async def test_jobs_are_queued_again_when_the_bus_came_back_empty(watched: Gateway) -> None:
    await watched.fleet()
    request = await watched.submit()
    watched.bus.forget_jobs()
    watched.bus.reconnects += 1
    await asyncio.sleep(LOOK_S)
    assert [job.attempt for job in watched.jobs("p0")] == [1]
    assert request.stream_seq in watched.bus.queued


async def test_silence_of_all_workers_says_nothing_about_one(watched: Gateway) -> None:
    workers = await watched.fleet()
    request = await watched.submit()
    await workers[0].claim(request)
    for worker in workers:
        worker.mute()
    await asyncio.sleep(WAIT.claimed_s + LOOK_S)
    assert watched.peers.hears_nobody
    assert (asked_for(workers[0], request), request.state.attempt) == ([], 1)


async def test_a_process_that_stood_still_first_hears_what_came_meanwhile(watched: Gateway) -> None:
    _, _, d0 = await watched.fleet()
    request = await watched.decoding()
    await asyncio.sleep(WATCH_PERIOD_S)
    watched.loop.now += 10 * STALL_S  # nothing ran
    await asyncio.sleep(LOOK_S)
    assert (asked_for(d0, request), request.state.attempt) == ([], 1)
    await asyncio.sleep(WAIT.decoding_s)
    assert asked_for(d0, request) == [2]  # the silence after that is the worker's own


async def test_a_look_that_fails_costs_the_other_requests_nothing(
    watched: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    await watched.fleet()
    broken, fine = await watched.submit("broken"), await watched.submit("fine", deadline_s=1.0)
    broken.state.progress_at = "never"  # type: ignore[assignment]
    with pytest.raises(DeadlineExceededError):
        await answer_of(fine)
    assert "request.watch_failed" in caplog.text
    broken.state.progress_at = 0.0


# -- the owner as HTTP sees it -------------------------------------------------------------------------------------------


async def test_the_heartbeat_tells_what_is_in_flight(watched: Gateway) -> None:
    await watched.fleet()
    await watched.submit()
    await asyncio.sleep(1.1)
    subject = subjects.gateway_heartbeat("here")
    state = [message for to, message in watched.bus.published if to == subject][-1]
    assert isinstance(state, GatewayState)
    assert (state.gateway, state.queued_requests, state.unclaimed_tokens) == ("here", 1, 40)


async def test_a_drain_serves_what_runs_and_ends_the_rest_with_an_error(watched: Gateway) -> None:
    _, _, d0 = await watched.fleet()
    ends, stays = await watched.decoding("ends"), await watched.submit("stays")
    draining = asyncio.create_task(watched.requests.drain(timeout_s=0.5))
    await watched.idle()
    with pytest.raises(UnavailableError, match="shutting down"):
        await watched.submit("late")
    d0.send(ends, 2, 102, finish="stop")
    assert await answer_of(ends) == [100, 101, 102]
    with pytest.raises(UnavailableError, match="shutting down"):
        await answer_of(stays)
    await draining
    assert len(watched.requests.seen.running) == 0


async def test_a_request_is_refused_at_once_while_nobody_decodes(watched: Gateway) -> None:
    assert watched.requests.not_ready_reason == "no decode worker is ready"
    with pytest.raises(UnavailableError, match="no decode worker is ready"):
        await watched.submit()
    _, _, d0 = await watched.fleet()
    assert watched.requests.ready
    await d0.stop()
    assert watched.requests.not_ready_reason == "no decode worker is ready"
