"""What workers say: claims, tokens, handoffs, failures, and that they are gone."""

from __future__ import annotations

import asyncio
import time

import pytest

from common import subjects
from common.blocks import pack_tokens
from common.errors import InvalidRequestError, PlaceAgainError, QuarantinedError, WorkerFailedError
from common.messages import (
    Ack,
    Cancel,
    Claim,
    Failed,
    Feature,
    Frame,
    Goal,
    Grammar,
    Imported,
    Received,
    Settle,
    Tokens,
    Trying,
)
from common.peers import DEAD_AFTER_S
from gateway.lifecycle.inbox import MAX_FRAME_TOKENS
from gateway.request.ends import MAX_PAUSE_S
from gateway.request.spec import Aim, Origin
from gateway.request.state import Phase
from tests.unit.gateway.lifecycle.conftest import Gateway, answer_of

FAILED = {"code": WorkerFailedError.code, "message": "the pass failed", "retryable": True}


# -- claims ------------------------------------------------------------------------------------------------------------


async def test_one_worker_gets_an_attempt_and_may_ask_twice(gateway: Gateway) -> None:
    p0, p1, _ = await gateway.fleet()
    request = await gateway.submit()
    reply = await p0.claim(request)
    assert (reply.granted, 59_000 < reply.remaining_ms <= 60_000) == (True, True)
    assert (await p0.claim(request)).granted
    refused = await p1.claim(request)
    assert (refused.granted, refused.reason) == (False, "claimed by another worker")
    assert gateway.requests.counters["claims_refused"] == 1
    assert request.timeline.attempts[0].claimed_by == "p0"


async def test_a_claim_tells_how_long_the_first_token_may_take(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    request = await gateway.submit(aim=Aim(first_token_s=3.0))
    assert 2_000 < (await p0.claim(request)).first_token_ms <= 3_000


async def test_a_job_has_its_request_s_goal_and_a_claim_tells_since_when_it_counts(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    goal = Goal(ttft_ms=200.0, tpot_ms=20.0)
    request = await gateway.submit(aim=Aim(goal), origin=Origin(received_at=time.monotonic() - 5.0))
    assert request.job is not None
    assert request.job.goal == goal
    assert 5_000 <= (await p0.claim(request)).age_ms < 60_000


async def test_a_claim_for_an_older_attempt_or_an_unknown_request_is_refused(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    request = await gateway.submit()
    assert (await p0.claim(request, attempt=2)).reason == "stale attempt"
    assert (await p0.claim(request, request_id="another")).reason == "unknown"
    request.cancel("the client left")
    assert (await p0.claim(request)).reason == "unknown"


async def test_another_incarnation_of_the_claimer_is_another_worker(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    request = await gateway.submit()
    await p0.claim(request)
    assert (await p0.claim(request, incarnation=2)).reason == "claimed by another worker"


@pytest.mark.parametrize("is_heard", [True, False])
async def test_a_worker_of_an_older_release_with_the_same_name_gets_no_grammar(
    gateway: Gateway, is_heard: bool
) -> None:
    """Its pod was rolled back, and it found the job in the queue; its first heartbeat may come later than its claim."""
    p0 = await gateway.worker("p0", "prefill", features=frozenset(Feature))
    await gateway.worker("d0", "decode", features=frozenset(Feature))
    request = await gateway.submit(grammar=Grammar(text='start: "yes"'))
    await gateway.worker("p1", "prefill", features=frozenset(Feature))
    if is_heard:
        await p0.beat(features=frozenset())
    claim = {} if is_heard else {"incarnation": 2}
    reply = await p0.claim(request, **claim)
    assert (reply.granted, reply.reason) == (False, "p0 isn't known to follow grammars")
    await gateway.idle()
    assert (request.state.attempt, request.state.failed, request.state.phase) == (2, 0, Phase.QUEUED)
    assert [job.attempt for _, job in gateway.bus.queued.values()] == [2]
    other = await gateway.submit("other")
    assert (await gateway.workers[other.state.assigned].claim(other, incarnation=2)).granted


async def test_a_worker_that_holds_a_claim_may_ask_whether_it_is_still_wanted(gateway: Gateway) -> None:
    """That is no later beginning: the time in the queue ended with the first claim, or with one whose answer was lost."""
    p0, _, _ = await gateway.fleet()
    request = await gateway.submit()
    await p0.claim(request)
    first = request.claimed_at
    await gateway.idle()
    await p0.claim(request)
    again = request.claimed_at
    assert first is not None
    assert again is not None
    assert again > first
    await gateway.idle()
    assert (await p0.claim(request, is_held=True)).granted
    assert request.claimed_at == again
    request.state.begin_attempt(0.0)
    assert (await p0.claim(request, attempt=1, is_held=True)).reason == "stale attempt"


async def test_only_the_claimer_may_settle_and_what_is_over_must_not_come_again(gateway: Gateway) -> None:
    p0, p1, _ = await gateway.fleet()
    request = await gateway.submit()
    await p0.claim(request)
    p0.send(request, 0, 100)
    assert not (await p1.say(Settle, request, decode_worker="d0", decode_incarnation=1)).ack
    assert request.state.phase is Phase.PREFILLED
    assert (await p0.say(Settle, request, decode_worker="d0", decode_incarnation=1)).ack
    assert (request.state.phase, request.state.decoder) == (Phase.DECODING, ("d0", 1))
    request.cancel("the client left")
    assert (await p1.say(Settle, request)).ack


async def test_an_import_tells_who_decodes_unless_it_is_old_news(gateway: Gateway) -> None:
    p0, _, d0 = await gateway.fleet()
    request = await gateway.submit()
    await p0.claim(request)
    facts = {"transferred_blocks": 2, "transferred_bytes": 64, "reused_blocks": 0, "transfer_ms": 3.0}
    assert await d0.say(Imported, request, **facts, attempt=7) == Ack(known=True)
    assert request.state.decoder is None
    assert await d0.say(Imported, request, **facts) == Ack(known=True)
    assert (request.state.decoder, request.timings["transfer"]) == (("d0", 1), 3.0)
    assert await d0.say(Imported, request, **facts, request_id="another") == Ack(known=False)


# -- frames ------------------------------------------------------------------------------------------------------------


async def test_tokens_reach_the_client_in_order_once(gateway: Gateway) -> None:
    _, _, d0 = await gateway.fleet()
    request = await gateway.decoding()
    d0.send(request, 3, 103)  # one is missing before it
    assert request.state.gap_since is not None
    d0.send(request, 1, 101)  # for the second time
    assert request.state.next_position == 2
    d0.send(request, 2, 102)
    assert (request.state.gap_since, request.state.next_position) == (None, 4)
    d0.send(request, 3, 103, 104, finish="stop")
    assert await answer_of(request) == [100, 101, 102, 103, 104]


async def test_tokens_of_an_older_attempt_are_counted_and_dropped(gateway: Gateway) -> None:
    _, _, d0 = await gateway.fleet()
    request = await gateway.decoding()
    d0.send(request, 2, 666, attempt=0)
    assert (request.state.next_position, gateway.requests.counters["stale_tokens"]) == (2, 1)


async def test_the_first_token_ends_what_its_prompt_was_charged(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    request = await gateway.submit()
    await p0.claim(request)
    p0.send(request, 0, 100)
    p0.send(request, 1, 101)
    await gateway.idle()
    assert gateway.ledger.released == [("r", 1, "prefill")]
    assert request.timings.keys() >= {"admission", "queue", "prefill", "first_frame"}


async def test_last_tokens_are_acknowledged_also_those_of_requests_that_are_over(gateway: Gateway) -> None:
    _, _, d0 = await gateway.fleet()
    request = await gateway.decoding()
    d0.send(request, 2, 102, finish="stop")
    await gateway.idle()
    assert [received.request_id for received in d0.told(Received)] == ["r"]
    d0.send(request, 2, 102, finish="stop")  # the worker did not hear it
    d0.send(request, 1, 101)
    await gateway.idle()
    assert [received.request_id for received in d0.told(Received)] == ["r", "r"]


async def test_one_frame_brings_tokens_of_many_requests(gateway: Gateway) -> None:
    await gateway.fleet()
    requests = [await gateway.decoding(name) for name in ("a", "b")]
    last = [
        Tokens(request_id=name, attempt=1, position=2, token_ids=pack_tokens([102]), finish="stop")
        for name in ("a", "gone", "b")
    ]
    gateway.requests.inbox.take_frame(Frame(worker="d0", incarnation=1, tokens=last))
    assert [await answer_of(request) for request in requests] == [[100, 101, 102]] * 2


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_a_failed_attempt_moves_to_another_worker(gateway: Gateway) -> None:
    p0, p1, _ = await gateway.fleet()
    request = await gateway.submit()
    await p0.claim(request)
    await p0.say(Failed, request, **FAILED)
    await gateway.idle()
    assert (request.state.attempt, request.state.assigned, request.state.failed) == (2, "p1", 1)
    await p0.say(Failed, request, **FAILED, attempt=1)  # said twice
    await p1.say(Failed, request, **FAILED, request_id="another")
    await gateway.idle()
    assert request.state.attempt == 2


async def test_a_failure_that_another_attempt_cannot_mend_ends_the_request(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    request = await gateway.submit()
    await p0.claim(request)
    await p0.say(Failed, request, code=InvalidRequestError.code, message="too long", retryable=False)
    with pytest.raises(InvalidRequestError, match="too long"):
        await answer_of(request)


async def test_a_worker_that_takes_no_such_work_is_not_blamed(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    request = await gateway.submit()
    await p0.say(Failed, request, code=PlaceAgainError.code, message="not mine", retryable=True)
    await gateway.idle()
    assert (request.state.excluded, request.state.failed) == ([], 0)


async def test_a_decode_worker_that_died_with_the_sequence_is_blamed_instead_of_who_says_so(gateway: Gateway) -> None:
    p0, _, _ = await gateway.fleet()
    await gateway.worker("d1", "decode")
    request = await gateway.submit()
    await p0.claim(request)
    await p0.say(Failed, request, **FAILED, dead_worker="d0")
    await gateway.idle()
    assert (request.state.excluded, request.state.deaths, request.state.is_suspect) == (["d0"], 1, True)
    [job] = gateway.jobs("p0")
    assert job.suspect_until > 0


# -- losses ------------------------------------------------------------------------------------------------------------


async def test_everything_that_a_lost_worker_had_moves_at_once(gateway: Gateway) -> None:
    p0, _, d0 = await gateway.fleet()
    await gateway.worker("d1", "decode")
    waits, claimed = await gateway.submit("waits"), await gateway.submit("claimed")
    decoding = await gateway.decoding("decoding")
    for request in (waits, claimed, decoding):
        request.state.assigned = "p0"
    await p0.claim(claimed)
    await p0.die()
    await gateway.worker("p0", "prefill", incarnation=2)  # a new life: the old one is gone
    await gateway.idle()
    assert [request.state.attempt for request in (waits, claimed, decoding)] == [2, 2, 1]
    assert [waits.state.failed, claimed.state.failed] == [0, 0]  # a death is judged by itself
    assert (waits.state.is_suspect, claimed.state.is_suspect) == (False, True)
    assert d0.told(Cancel)  # it may hold something of the two


async def test_a_worker_that_was_told_to_stop_costs_no_attempt(gateway: Gateway) -> None:
    await gateway.worker("d0", "decode")
    worker = await gateway.worker("p-0", "prefill")
    request = await gateway.submit()
    for number in range(1, 6):
        await worker.claim(request)
        newer = await gateway.worker(f"p-{number}", "prefill")
        await worker.stop()
        await gateway.idle()
        assert request.state.assigned == newer.itself.worker
        worker = newer
    assert (request.state.failed, request.state.deaths, request.state.is_over) == (0, 0, False)


async def test_a_request_that_was_named_before_its_second_worker_died_is_given_up(gateway: Gateway) -> None:
    await gateway.fleet()
    poison = await gateway.submit()
    for _ in range(2):
        worker = gateway.workers[poison.state.assigned]
        await worker.claim(poison)
        assert await worker.say(Trying, poison) == Ack(known=True)
        await worker.die()
        await gateway.worker(worker.itself.worker, "prefill", incarnation=worker.itself.number + 1)
        await gateway.idle()
    with pytest.raises(QuarantinedError, match="2 workers died of it"):
        await answer_of(poison)
    assert [reason for _, _, reason in gateway.bus.buried] == ["2 workers died of it"]


@pytest.mark.parametrize(("position", "is_named"), [(2, True), (1, False), (-1, True)])
async def test_a_trial_that_is_named_after_its_token_came_is_over(
    position: int, is_named: bool, gateway: Gateway
) -> None:
    """Names and tokens come by two subscriptions. -1: a worker of an older release."""
    await gateway.fleet()
    request = await gateway.decoding()
    assert request.state.next_position == 2
    decoder = gateway.workers["d0"]
    await decoder.say(Trying, request, position=position)
    assert gateway.requests.seen.suspects.is_tried_by("d0", request.state) == is_named


async def test_a_paused_host_convicts_nobody(gateway: Gateway) -> None:
    """Its heartbeats stop for longer than a lease, again and again; then they come back with the same incarnation."""
    await gateway.fleet()
    request = await gateway.submit()
    for _ in range(4):
        worker = gateway.workers[request.state.assigned]
        await worker.claim(request)
        await worker.say(Trying, request)
        worker.mute()
        await asyncio.sleep(DEAD_AFTER_S + 1)
        gateway.peers.check()
        await worker.start()
        await asyncio.sleep(MAX_PAUSE_S)
    assert (request.state.deaths, request.state.is_over, request.state.is_suspect) == (0, False, True)


async def test_a_worker_that_was_cut_off_and_comes_back_was_not_killed(gateway: Gateway) -> None:
    await gateway.fleet()
    request = await gateway.submit()
    worker = gateway.workers[request.state.assigned]
    await worker.claim(request)
    await worker.say(Failed, request, **FAILED, dead_worker=worker.itself.worker)  # as its receiver would say
    await gateway.idle()
    assert request.state.deaths == 1
    await worker.beat()
    assert request.state.deaths == 0


async def test_nothing_is_kept_of_workers_that_are_gone(gateway: Gateway) -> None:
    """Names may be new each time, as pods' are. Their last words come after everybody was told that they are lost."""
    capacities, pulse = gateway.requests.capacities, gateway.requests.seen.pulse
    await gateway.fleet()
    await gateway.worker("d1", "decode")
    before = (len(capacities), len(pulse))
    for number in range(20):
        worker = await gateway.worker(f"p-{number}", "prefill")
        assert len(capacities.capacity([]).workers) == 3  # decode workers compute no prompts here
        assert (len(capacities), len(pulse)) == (before[0] + 1, before[1] + 1)
        await worker.die()
        await worker.beat(status="stopped" if number % 2 else "broken")
        assert (len(capacities), len(pulse)) == before


async def test_who_does_not_have_a_request_has_no_say_in_it(gateway: Gateway) -> None:
    """p1 knows its id, and speaks in its own name."""
    _, p1, _ = await gateway.fleet()
    request = await gateway.decoding()
    p1.send(request, 2, 999, finish="stop")
    await p1.say(Failed, request, code="invalid_request", message="no", retryable=False)
    await p1.say(Imported, request, transferred_blocks=1, transferred_bytes=1, reused_blocks=0, transfer_ms=1.0)
    await gateway.idle()
    assert (request.state.attempt, request.state.generated, request.state.is_over) == (1, [100, 101], False)
    assert request.state.decoder == gateway.workers["d0"].itself


async def test_a_frame_is_no_longer_than_workers_make_them(gateway: Gateway) -> None:
    """The end of each unknown stream is acknowledged: a longer frame would make this gateway send that much."""
    p0, _, _ = await gateway.fleet()
    end = Tokens(request_id="unknown", attempt=1, position=0, token_ids=b"", finish="stop")
    for number in (MAX_FRAME_TOKENS, MAX_FRAME_TOKENS + 1):
        gateway.requests.inbox.take_frame(Frame(worker="p0", incarnation=1, tokens=[end] * number))
    assert len(list(gateway.requests.keeping.background)) == MAX_FRAME_TOKENS
    assert gateway.bus.forged == 1
    assert p0.told(Received) == []


async def test_a_worker_that_says_its_name_is_not_believed_without_it(gateway: Gateway) -> None:
    await gateway.fleet()
    await gateway.requests.start()
    await gateway.submit()
    claim = Claim(request_id="r", attempt=1, worker="p0", incarnation=1)
    for subject in (subjects.gateway("here"), subjects.gateway("here", "p1")):
        await gateway.bus.publish(subject, claim)
    assert gateway.bus.forged == 2
    assert gateway.requests.counters["forged_messages"] == 2
    await gateway.bus.publish(subjects.gateway("here", "p0"), claim)
    assert [request.state.phase for request in gateway.requests.seen.running] == [Phase.CLAIMED]
    await gateway.requests.close()


async def test_the_bus_brings_it_all(gateway: Gateway) -> None:
    """Wired as in a process: the requests' own subjects."""
    p0, _, _ = await gateway.fleet()
    await gateway.requests.start()
    request = await gateway.submit()
    claim = Claim(request_id="r", attempt=1, worker="p0", incarnation=1)
    await gateway.bus.publish(subjects.gateway("here", "p0"), claim)
    tokens = Tokens(request_id="r", attempt=1, position=0, token_ids=pack_tokens([7]), finish="stop")
    await gateway.bus.publish(subjects.frames("here", "p0"), Frame(worker="p0", incarnation=1, tokens=[tokens]))
    assert await answer_of(request) == [7]
    await gateway.idle()
    assert p0.told(Received)
    await gateway.requests.close()
    assert not list(gateway.requests.keeping.background)


async def test_a_job_in_the_queue_of_a_name_that_has_another_model_now_goes_elsewhere(gateway: Gateway) -> None:
    p0, p1, _ = await gateway.fleet()
    request = await gateway.submit(model_fingerprint="m")
    assert request.state.assigned == "p0"
    await p0.die()
    again = await gateway.worker("p0", "prefill", incarnation=2, model="other", model_fingerprint="other")
    reply = await again.claim(request, attempt=1)
    assert not reply.granted
    await gateway.idle()
    assert request.state.assigned == "p1"
    assert (await p1.claim(request)).granted
