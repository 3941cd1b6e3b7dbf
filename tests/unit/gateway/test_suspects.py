"""Who is given up for killing workers, and who only happened to be there."""

from __future__ import annotations

import asyncio

import pytest

from common.messages import SamplingParams
from gateway.generation import GenerationSpec
from gateway.owner import Phase, RequestState
from gateway.suspects import CLEARED_TOKENS, FEW, Suspects


def request(*, phase: Phase = Phase.CLAIMED) -> RequestState:
    spec = GenerationSpec(request_id="r", token_ids=[1, 2], sampling=SamplingParams(max_tokens=50), deadline_s=60)
    return RequestState(spec=spec, deadline_at=60.0, phase=phase)


async def test_who_kills_a_second_worker_alone_is_convicted() -> None:
    suspects, poison = Suspects(), request()
    assert not suspects.convict(poison, others=9)
    await suspects.alone(poison)
    assert suspects.convict(poison, others=0)


async def test_suspects_go_one_after_the_other_until_each_got_further() -> None:
    suspects, first, second = Suspects(), request(), request()
    for state in (first, second):
        suspects.convict(state, others=1)
    await suspects.alone(first)
    waiting = asyncio.create_task(suspects.alone(second))
    await asyncio.sleep(0)
    assert not waiting.done()
    first.generated.append(7)
    suspects.heard(first)
    await asyncio.wait_for(waiting, 1.0)
    assert (first.deaths, first.untried) == (0, 1)  # not its fault: it does not count


async def test_the_end_of_the_one_tried_lets_the_next_one_go() -> None:
    suspects, first, second = Suspects(), request(), request()
    for state in (first, second):
        suspects.convict(state, others=1)
    await suspects.alone(first)
    waiting = asyncio.create_task(suspects.alone(second))
    await asyncio.sleep(0)
    first.phase = Phase.ENDED
    suspects.heard(first)
    await asyncio.wait_for(waiting, 1.0)


async def test_many_streams_of_a_dead_worker_move_at_once_and_none_is_convicted_for_it() -> None:
    suspects = Suspects()
    streams = [request(phase=Phase.DECODING) for _ in range(FEW + 1)]
    for state in streams:
        assert not suspects.convict(state, others=FEW)
        await asyncio.wait_for(suspects.alone(state), 1.0)
    for state in streams:
        assert not suspects.convict(state, others=FEW)  # it was not alone: it has another try, alone
        assert state.is_suspect


async def test_who_got_further_is_no_suspect_any_more() -> None:
    suspects, state = Suspects(), request(phase=Phase.DECODING)
    suspects.convict(state, others=0)
    await suspects.alone(state)
    for _ in range(CLEARED_TOKENS):
        assert state.is_suspect
        state.generated.append(1)
        suspects.heard(state)
    assert not state.is_suspect
    assert not suspects.convict(state, others=0)


async def test_a_suspect_waits_a_second_at_most_and_then_neither_was_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.suspects.LONGEST_WAIT_S", 0.01)
    suspects, slow, second = Suspects(), request(), request()
    for state in (slow, second):
        suspects.convict(state, others=1)
        await asyncio.wait_for(suspects.alone(state), 1.0)
    assert not suspects.convict(slow, others=1)
    assert not suspects.convict(second, others=1)


async def test_a_suspect_that_ended_while_it_waited_holds_nobody_up() -> None:
    suspects, first, left, last = Suspects(), request(), request(), request()
    for state in (first, left, last):
        suspects.convict(state, others=2)
    await suspects.alone(first)
    waiting = asyncio.create_task(suspects.alone(left))
    await asyncio.sleep(0)
    left.phase = Phase.ENDED
    suspects.heard(left)
    first.generated.append(7)
    suspects.heard(first)
    await waiting
    suspects.convict(last, others=0)
    await asyncio.wait_for(suspects.alone(last), 0.5)
    assert last.was_alone
