"""Responses that are made in the background: polled, streamed, taken up again, cancelled, and what a gateway's death means."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from common.errors import OverloadedError, WorkerFailedError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.keeping import streams
from gateway.responses import runner
from tests.integration.responses.conftest import One, one_of
from tests.integration.waiting import eventually
from tests.unit.gateway.conftest import MODEL, TEXT


async def begun(one: One, text: str = "Hello", **fields: Any) -> Any:
    return await one.openai.responses.create(model=MODEL, input=text, max_output_tokens=64, background=True, **fields)


async def over(one: One, response_id: str) -> Any:
    async def look() -> Any:
        found = await one.openai.responses.retrieve(response_id)
        return found if found.status not in ("queued", "in_progress") else None

    return await eventually(look)


async def events_of(stream: Any) -> list[Any]:
    async with stream:
        return [event async for event in stream]


def hold(*ones: One) -> None:
    """Their generations stop after three tokens."""
    for one in ones:
        one.script.hold_after = 3
        one.script.release = asyncio.Event()


def go_on(*ones: One) -> None:
    for one in ones:
        one.script.hold_after = None
        one.script.release.set()


async def running(*ones: One) -> One:
    """The gateway that makes the response."""

    async def look() -> One | None:
        return next((one for one in ones if one.script.running), None)

    found = await eventually(look)
    assert found is not None
    return found


async def die(one: One) -> None:
    """As kill -9 would: nothing is said to anybody."""
    kept, runner_ = one.kept, one.kept._runner
    assert kept._streams._beating is not None
    assert runner_ is not None
    kept._streams._beating.cancel()
    await kept._streams._client.close()
    for task in runner_._tasks:
        task.cancel()


async def test_it_is_queued_then_in_progress_then_completed_and_asks_no_client_to_stay(here: One, there: One) -> None:
    hold(here, there)
    queued = await begun(here)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])

    async def is_made() -> bool:
        return (await there.openai.responses.retrieve(queued.id)).status == "in_progress"

    await eventually(is_made)
    go_on(here, there)
    done = await over(there, queued.id)
    assert (done.status, done.output_text, done.id) == ("completed", TEXT, queued.id)
    assert done.usage.output_tokens > 10
    assert done.created_at == queued.created_at
    after = await there.openai.responses.create(model=MODEL, input="and?", previous_response_id=done.id)
    assert after.status == "completed"


async def test_its_stream_is_taken_up_again_anywhere_while_it_is_made_and_after(here: One, there: One) -> None:
    hold(here, there)
    stream = await begun(here, stream=True)
    first = [await anext(stream) for _ in range(6)]
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in first] == list(range(6))
    await stream.close()
    response_id = first[0].response.id
    resumed = asyncio.ensure_future(
        events_of(await there.openai.responses.retrieve(response_id, stream=True, starting_after=3))
    )
    go_on(here, there)
    rest = await resumed
    assert [event.sequence_number for event in rest] == list(range(4, 4 + len(rest)))
    assert rest[-1].type == "response.completed"
    again = await events_of(await here.openai.responses.retrieve(response_id, stream=True))
    assert again[:6] == first
    assert again[4:] == rest
    text = "".join(event.delta for event in again if event.type == "response.output_text.delta")
    assert text == TEXT == rest[-1].response.output_text
    assert await here.openai.responses.retrieve(response_id) == rest[-1].response
    assert await events_of(await here.openai.responses.retrieve(response_id, stream=True, starting_after=999)) == []
    with pytest.raises(openai.NotFoundError):
        await here.as_other().responses.retrieve(response_id, stream=True)


async def test_cancelling_ends_the_work_wherever_it_is(here: One, there: One) -> None:
    hold(here, there)
    stream = await begun(here, stream=True)
    opening = await anext(stream)
    maker = await running(here, there)
    other = there if maker is here else here
    cancelled = await other.openai.responses.cancel(opening.response.id)
    assert cancelled.status == "cancelled"
    rest = await events_of(stream)
    assert not any(event.type == "response.completed" for event in rest)

    async def is_quiet() -> bool:
        return not maker.script.running

    await eventually(is_quiet)
    assert (await here.openai.responses.cancel(opening.response.id)).status == "cancelled"
    done = await begun(other)
    go_on(here, there)
    assert (await other.openai.responses.cancel((await over(other, done.id)).id)).status == "completed"
    with pytest.raises(openai.BadRequestError, match="only one that is completed"):
        await other.openai.responses.create(model=MODEL, input="x", previous_response_id=opening.response.id)


async def test_it_waits_for_room_and_fails_with_its_worker(here: One) -> None:
    here.script.refuse = OverloadedError("no room", retry_after_s=0.0)
    queued = await begun(here)

    async def was_refused() -> bool:
        return here.kept._runner._metrics._background.labels("again")._value.get() > 0  # type: ignore[union-attr]

    await eventually(was_refused)
    assert (await here.openai.responses.retrieve(queued.id)).status == "queued"
    here.script.refuse = None
    assert (await over(here, queued.id)).status == "completed"
    here.script.fail, here.script.fail_after = WorkerFailedError("worker gone"), 3
    failed = await over(here, (await begun(here)).id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    events = await events_of(await begun(here, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response == await here.openai.responses.retrieve(events[-1].response.id)
    long = await over(here, (await begun(here, "x " * 5_000)).id)
    assert (long.status, long.error.code) == ("failed", "invalid_prompt")


async def test_what_can_t_be_asked_for_is_refused_at_once(here: One) -> None:
    for fields, told in (
        ({"store": False}, "needs store"),
        ({"previous_response_id": "resp_1"}, "no response"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            await begun(here, **fields)  # type: ignore[arg-type]
    for query in ("stream=maybe", "stream=true&starting_after=x", "starting_after=1", "what=1"):
        done = await begun(here)
        answer = await here.http.get(f"/v1/responses/{done.id}?{query}")
        assert answer.status_code == 400, query
        await over(here, done.id)  # the next test's gateway would make it


async def test_a_gateway_s_death_gives_it_to_another_one_unless_its_stream_had_begun(
    url: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ACK_WAIT_S", 1.0)
    async with one_of(url, tokenizer) as dying:
        hold(dying)
        polled, streamed = await begun(dying), await begun(dying, stream=True)
        told = [await anext(streamed) for _ in range(5)]

        async def both() -> bool:
            return len(dying.script.running) == 2

        await eventually(both)
        await die(dying)
        async with one_of(url, tokenizer) as heir:
            done = await over(heir, polled.id)
            assert (done.status, done.output_text) == ("completed", TEXT)
            failed = await over(heir, told[0].response.id)
            assert (failed.status, failed.error.message) == ("failed", runner.STREAM_BEGAN)
            events = await events_of(await heir.openai.responses.retrieve(failed.id, stream=True))
            assert events[:5] == told
            assert events[-1].type == "response.failed"
            assert events[-1].sequence_number == len(events) - 1


async def test_a_gateway_that_ends_gives_back_what_it_has_not_told(url: str, tokenizer: ChatTokenizer) -> None:
    async with one_of(url, tokenizer) as ending:
        hold(ending)
        polled = await begun(ending)
        await running(ending)
    async with one_of(url, tokenizer) as heir:
        assert (await over(heir, polled.id)).status == "completed"
        record = await heir.kept._store.record("tenant-0", polled.id)
        assert record.starts == 1  # an orderly end does not count


async def test_a_gateway_that_ends_waits_for_no_stream(url: str, tokenizer: ChatTokenizer) -> None:
    async with one_of(url, tokenizer) as ending, one_of(url, tokenizer) as staying:
        hold(ending, staying)
        stream = await begun(ending, stream=True)
        response_id = (await anext(stream)).response.id
        ending.kept.hang_up()
        told = await events_of(stream)
        assert not any(event.type == "response.completed" for event in told)
        go_on(ending, staying)
        done = await events_of(await staying.openai.responses.retrieve(response_id, stream=True))
        assert done[-1].type == "response.completed"


async def test_one_that_gateways_die_of_is_given_up(here: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_STARTS", 0)
    failed = await over(here, (await begun(here)).id)
    assert (failed.status, failed.error.message) == ("failed", runner.GIVEN_UP)


async def test_a_conversation_gets_its_items(here: One) -> None:
    conversation = await here.openai.conversations.create()
    done = await over(here, (await begun(here, conversation=conversation.id)).id)
    items = (await here.openai.conversations.items.list(conversation.id, order="asc")).data
    assert [item.id for item in items[1:]] == [done.output[0].id]
