"""The owner's record of a request under any order of events: tokens in order, none twice, none missing."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.blocks import pack_tokens
from common.messages import SamplingParams, TokenLogprobs, Tokens
from common.peers import Incarnation
from gateway.request.ends import Sign
from gateway.request.spec import GenerationSpec
from gateway.request.state import Phase, RequestState
from tests.examples import examples

PREFILL, DECODE, OTHER = Incarnation("p", 1), Incarnation("d", 1), Incarnation("d", 2)
ANSWER = [100 + index for index in range(30)]


def request() -> RequestState:
    spec = GenerationSpec(request_id="r", token_ids=[1, 2], sampling=SamplingParams(max_tokens=30), deadline_s=60)
    return RequestState(spec=spec, deadline_at=60.0)


def tokens(attempt: int, start: int, end: int) -> Tokens:
    finish = "length" if end == len(ANSWER) else ""
    return Tokens(
        request_id="r", attempt=attempt, position=start, token_ids=pack_tokens(ANSWER[start:end]), finish=finish
    )


def claimed() -> RequestState:
    state = request()
    state.begin_attempt(0.0)
    state.placed("p", ["d"])
    assert state.claim(1, PREFILL, 0.0) == ""
    return state


def told(state: RequestState, frame: Tokens, sender: Incarnation) -> list[int]:
    """The new tokens that go to the client: each frame goes the short way if it may, as the inbox does it."""
    at = state.next_position
    token_id = state.take_next(frame, sender, 0.0)
    if token_id >= 0:
        return [token_id]
    events = state.take(frame, sender, 0.0)
    assert not events or events[0].position == at
    if events:
        state.flows(sender)
    return [token_id for event in events for token_id in event.token_ids]


@pytest.mark.parametrize(
    ("first", "promised", "second", "counted"),
    [
        ("p", 0, "p", 0),  # what the first attempt computed there
        ("p", 16, "p", 16),
        ("p", 0, "d", 0),  # what it handed over
        ("p", 0, "q", 48),  # another worker has it of other requests
    ],
)
def test_cached_tokens_are_not_what_an_earlier_attempt_left(
    first: str, promised: int, second: str, counted: int
) -> None:
    state = request()
    for worker, cached in ((first, promised), (second, 48)):
        state.begin_attempt(0.0)
        state.placed(worker, ["d"])
        state.cached_tokens = cached
    found = msgspec.structs.replace(tokens(2, 0, 1), cached_tokens=48)
    assert state.without_own(found).cached_tokens == counted
    fresh = request()
    fresh.begin_attempt(0.0)
    fresh.placed("p", ["d"])
    assert fresh.without_own(found).cached_tokens == 48


@examples(120)
@given(seed=st.integers(0, 2**32))
def test_tokens_come_in_order_once_whatever_the_network_does(seed: int) -> None:
    rng = random.Random(seed)
    state = request()
    received: list[int] = []
    while state.phase is not Phase.ENDED:
        assert state.begin_attempt(0.0)
        if state.attempt > 3:
            break
        state.placed("p", ["d"])
        state.claim(state.attempt, PREFILL, 0.0)
        first = state.next_position
        frames = [tokens(state.attempt, at, at + 1) for at in range(first, len(ANSWER))]
        frames = [frame for frame in frames if rng.random() > 0.1]
        frames += [rng.choice(frames) for _ in range(5) if frames]
        frames += [tokens(state.attempt - 1, at, at + 2) for at in range(0, 20, 3)]  # late ones of the attempt before
        if rng.random() < 0.5:
            rng.shuffle(frames)
        else:  # two connections, of which one is slower now and then
            for at in range(0, len(frames) - 1, rng.randrange(2, 9)):
                frames[at : at + 2] = reversed(frames[at : at + 2])
        for frame in frames:
            received += told(state, frame, DECODE if frame.position else PREFILL)
            assert state.next_position not in state._held, "it is here, and waits"
            assert state._held or state.gap_since is None
        if rng.random() < 0.5:  # the answer to a `Resend`
            received += told(state, tokens(state.attempt, state.next_position, len(ANSWER)), DECODE)
            assert state.is_over
    assert received == ANSWER[: len(received)]
    assert received == state.generated
    assert (state.phase is Phase.ENDED) == (len(received) == len(ANSWER))


def flowing() -> RequestState:
    """It is being decoded, and all is known of its attempt."""
    state = claimed()
    state.take(tokens(1, 0, 1), PREFILL, 0.0)
    assert state.settle(1, PREFILL, DECODE)
    state.take(tokens(1, 1, 5), DECODE, 0.0)
    state.flows(DECODE)
    return state


def test_the_next_token_alone_needs_no_further_look() -> None:
    state = flowing()
    state.unanswered = 1
    assert state.take_next(tokens(1, 5, 6), DECODE, 2.0) == ANSWER[5]
    assert state.generated == ANSWER[:6]
    assert (state.progress_at, state.unanswered) == (2.0, 0)


@pytest.mark.parametrize(
    ("frame", "sender"),
    [
        (tokens(1, 4, 5), DECODE),
        (tokens(1, 6, 7), DECODE),
        (tokens(2, 5, 6), DECODE),
        (tokens(1, 5, 7), DECODE),
        (tokens(1, 5, 5), DECODE),
        (tokens(1, 5, 6), OTHER),
        (tokens(1, 5, 6), PREFILL),
        (msgspec.structs.replace(tokens(1, 5, 6), finish="stop"), DECODE),
        (msgspec.structs.replace(tokens(1, 5, 6), logprobs=[TokenLogprobs(logprob=-1.0)]), DECODE),
    ],
)
def test_whatever_else_comes_is_looked_at(frame: Tokens, sender: Incarnation) -> None:
    state = flowing()
    assert state.take_next(frame, sender, 2.0) == -1
    assert state.generated == ANSWER[:5]


def test_what_happens_to_a_request_makes_its_next_token_worth_a_look() -> None:
    for happens in (
        lambda state: state.begin_attempt(1.0),
        lambda state: state.suspect(),
        lambda state: state.gave_up(Sign.FAILED),
        lambda state: state.imported(1, DECODE),
        lambda state: state.settle(1, PREFILL, DECODE),
        lambda state: state.take(tokens(1, 6, 7), DECODE, 1.0),
    ):
        state = flowing()
        happens(state)
        assert state.take_next(tokens(state.attempt, 5, 6), DECODE, 2.0) == -1


def test_a_token_that_fills_a_gap_brings_those_behind_it() -> None:
    state = flowing()
    assert state.take(tokens(1, 6, 8), DECODE, 1.0) == []
    assert told(state, tokens(1, 5, 6), DECODE) == ANSWER[5:8]
    assert state.gap_since is None


def test_a_request_with_a_gap_or_little_progress_does_not_flow() -> None:
    early, gap = claimed(), flowing()
    early.take(tokens(1, 0, 1), PREFILL, 0.0)
    early.settle(1, PREFILL, DECODE)
    early.take(tokens(1, 1, 3), DECODE, 0.0)
    gap.settle(1, PREFILL, DECODE)
    gap.take(tokens(1, 7, 8), DECODE, 0.0)
    for state in (early, gap):
        state.flows(DECODE)
        assert state.take_next(tokens(1, state.next_position, state.next_position + 1), DECODE, 2.0) == -1


def test_only_one_worker_gets_an_attempt_and_may_ask_twice() -> None:
    state = claimed()
    assert state.claim(1, PREFILL, 0.0) == ""
    assert state.claim(1, OTHER, 0.0) != ""
    assert state.claim(2, OTHER, 0.0) != ""


def test_a_stale_worker_may_not_ack_the_job() -> None:
    state = claimed()
    state.begin_attempt(0.0)
    assert not state.settle(1, PREFILL, DECODE)
    assert state.claim(2, OTHER, 0.0) == ""
    assert state.settle(2, OTHER, DECODE)


def test_nothing_is_taken_before_the_attempt_was_claimed() -> None:
    state = request()
    state.begin_attempt(0.0)
    assert state.take(tokens(1, 0, 1), PREFILL, 0.0) == []


def test_attempts_end_with_the_answer() -> None:
    state = claimed()
    assert state.begin_attempt(0.0)
    state.phase = Phase.ENDED
    assert not state.begin_attempt(0.0)


def test_who_is_missed_depends_on_the_phase() -> None:
    state = claimed()
    assert state.lost(PREFILL)
    assert not state.lost(DECODE)
    state.take(tokens(1, 0, 1), PREFILL, 0.0)
    assert state.settle(1, PREFILL, DECODE)
    assert not state.lost(PREFILL)
    assert state.lost(DECODE)
    assert not state.lost(OTHER)


def test_a_job_is_misplaced_while_it_waits_for_a_role_that_its_worker_lost() -> None:
    handed_over, local = request(), request()
    for state, candidates in (handed_over, ["d"]), (local, []):
        state.begin_attempt(0.0)
        state.placed("p", candidates)
    assert handed_over.is_misplaced("p", ["decode"])
    assert not handed_over.is_misplaced("p", ["prefill"])
    assert not handed_over.is_misplaced("d", [])
    assert local.is_misplaced("p", ["prefill"])
    assert not local.is_misplaced("p", ["decode"])
    handed_over.claim(1, PREFILL, 0.0)
    assert not handed_over.is_misplaced("p", ["decode"])
