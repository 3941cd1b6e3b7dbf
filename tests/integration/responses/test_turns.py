"""Responses that go on from kept ones, with OpenAI's client: the model reads what it would read if all was sent anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.responses import conversations
from tests.integration.responses.conftest import LIMITS, One, one_of
from tests.unit.gateway.conftest import MODEL, TEXT, run_gateway

ASKED = ["What is the capital of France?", "How many live there?", "And in Lyon?"]


def prompts(one: One) -> list[list[int]]:
    return [spec.token_ids for spec in one.script.submitted]


async def asked(one: One, text: str | list[Any], **fields: Any) -> Any:
    return await one.openai.responses.create(model=MODEL, input=text, max_output_tokens=64, **fields)


async def sent_whole(one: One, answers: list[Any]) -> list[list[int]]:
    """The prompts of the same turns where a client sends all of them."""
    before = len(one.script.submitted)
    items: list[Any] = []
    for text, answer in zip(ASKED, answers, strict=True):
        items.append({"role": "user", "content": text})
        await asked(one, items, store=False)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
    return prompts(one)[before:]


async def test_three_turns_are_read_as_if_all_was_sent_also_by_another_gateway(here: One, there: One) -> None:
    previous, answers = None, []
    for number, text in enumerate(ASKED):
        answer = await asked((here, there)[number % 2], text, previous_response_id=previous)
        assert (answer.store, answer.previous_response_id, answer.status) == (True, previous, "completed")
        answers.append(answer)
        previous = answer.id
    chained = [prompts(here)[0], prompts(there)[0], prompts(here)[1]]
    assert await sent_whole(here, answers) == chained
    assert len(chained[2]) > len(chained[1]) > len(chained[0])
    for one in (here, there):
        assert await one.openai.responses.retrieve(answers[2].id) == answers[2]
    items = await there.openai.responses.input_items.list(answers[2].id)
    assert [item.content[0].text for item in items.data] == [ASKED[2]]  # type: ignore[union-attr]


async def test_a_conversation_is_read_as_if_all_was_sent(here: One, there: One) -> None:
    conversation = await here.openai.conversations.create(metadata={"topic": "towns"})
    answers = [
        await asked((here, there)[number % 2], text, conversation=conversation.id) for number, text in enumerate(ASKED)
    ]
    assert answers[0].conversation.id == conversation.id
    chained = [prompts(here)[0], prompts(there)[0], prompts(here)[1]]
    assert await sent_whole(there, answers) == chained
    items = [item async for item in there.openai.conversations.items.list(conversation.id, order="asc", limit=2)]
    assert [item.role for item in items] == ["user", "assistant"] * 3  # type: ignore[union-attr]
    assert items[1].id == answers[0].output[0].id
    with pytest.raises(openai.BadRequestError, match="go on with that"):
        await asked(here, "x", previous_response_id=answers[0].id)
    with pytest.raises(openai.BadRequestError, match="not together"):
        await asked(here, "x", previous_response_id=answers[0].id, conversation=conversation.id)


async def test_items_may_be_referred_to(here: One) -> None:
    first = await asked(here, ASKED[0])
    mine = (await here.openai.responses.input_items.list(first.id)).data[0].id
    references = [{"type": "item_reference", "id": mine}, {"id": first.output[0].id}]
    await asked(here, [*references, {"role": "user", "content": ASKED[1]}])
    await asked(here, ASKED[1], previous_response_id=first.id)
    assert prompts(here)[1] == prompts(here)[2]
    conversation = await here.openai.conversations.create(items=[{"role": "user", "content": ASKED[0]}])
    said = (await here.openai.conversations.items.list(conversation.id)).data[0].id
    await asked(here, [{"type": "item_reference", "id": said}])
    assert prompts(here)[3] == prompts(here)[0]
    for unknown in ("msg_mine", mine[:-4] + "0fff", f"msg_{'0' * 32}0000"):
        with pytest.raises(openai.NotFoundError, match="send the item itself"):
            await asked(here, [{"type": "item_reference", "id": unknown}])
    with pytest.raises(openai.NotFoundError):
        await here.as_other().responses.create(model=MODEL, input=references)  # type: ignore[arg-type]


async def test_a_stream_is_kept_before_its_client_hears_of_the_end(here: One, there: One) -> None:
    async with await asked(here, ASKED[0], stream=True) as stream:
        events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    told = events[-1].response
    assert told.store
    assert await there.openai.responses.retrieve(told.id) == told
    await asked(there, ASKED[1], previous_response_id=told.id)
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        await here.openai.responses.retrieve(told.id, stream=True)


async def test_what_is_not_stored_or_deleted_or_another_s_is_not_there(here: One) -> None:
    unkept = await asked(here, "x", store=False)
    assert not unkept.store
    kept = await asked(here, "x")
    later = await asked(here, "y", previous_response_id=kept.id)
    stranger = here.as_other()
    for client, response_id in (
        (here.openai, unkept.id),
        (stranger, kept.id),
        (here.openai, "resp_x"),
        (here.openai, "*"),
    ):
        for act in (
            client.responses.retrieve(response_id),
            client.responses.delete(response_id),
            client.responses.cancel(response_id),
            client.responses.input_items.list(response_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await act
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="x", previous_response_id=response_id)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.BadRequestError, match="background can be cancelled"):
        await here.openai.responses.cancel(kept.id)
    await here.openai.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        await here.openai.responses.retrieve(kept.id)
    with pytest.raises(openai.BadRequestError, match=kept.id):
        await asked(here, "z", previous_response_id=later.id)


async def test_conversations_over_http(here: One) -> None:
    client = here.openai.conversations
    conversation = await client.create(items=[{"role": "user", "content": "a"}], metadata={"topic": "x"})
    added = await client.items.create(
        conversation.id,
        items=[
            {"role": "assistant", "content": "b"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        ],
    )
    assert [item.type for item in added.data] == ["message", "function_call", "function_call_output"]
    newest = await client.items.list(conversation.id, limit=3)
    assert [item.id for item in newest.data] == [item.id for item in reversed(added.data)]
    assert newest.has_more
    assert await client.items.retrieve(added.data[1].id, conversation_id=conversation.id) == added.data[1]
    assert (await client.items.delete(added.data[1].id, conversation_id=conversation.id)).id == conversation.id
    assert (await client.update(conversation.id, metadata={"topic": "y"})).metadata == {"topic": "y"}
    assert (await client.retrieve(conversation.id)).metadata == {"topic": "y"}
    stranger = here.as_other().conversations
    for act in (
        stranger.retrieve(conversation.id),
        stranger.delete(conversation.id),
        stranger.items.list(conversation.id),
        client.items.retrieve(added.data[1].id, conversation_id=conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await act
    with pytest.raises(openai.NotFoundError):
        await here.as_other().responses.create(model=MODEL, input="x", conversation=conversation.id)
    for wrong, told in (
        ({"items": [{"role": "user", "content": "a"}] * 21}, "items"),
        ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "itself"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
    ):
        answer = await here.http.post("/v1/conversations", json=wrong)
        assert answer.status_code == 400, answer.text
        assert told in answer.text
    for query in ("limit=0", "limit=101", "order=up", "after=nothing", "what=1"):
        answer = await here.http.get(f"/v1/conversations/{conversation.id}/items?{query}")
        assert answer.status_code in (400, 404), query
    assert (await client.delete(conversation.id)).deleted


async def test_where_nothing_is_kept_it_says_so(tokenizer: ChatTokenizer) -> None:
    async with run_gateway(tokenizer, HttpSettings()) as bare:
        for method, path in (
            ("GET", "/v1/responses/resp_1"),
            ("POST", "/v1/conversations"),
            ("DELETE", "/v1/responses/x"),
        ):
            answer = await bare.http.request(method, path)
            assert answer.status_code == 404
            assert "--responses-store-mb off" in answer.json()["error"]["message"]
        assert not (await bare.openai.responses.create(model=MODEL, input="x")).store
        with pytest.raises(openai.NotFoundError, match="not kept here"):
            await bare.openai.responses.create(model=MODEL, input="x", previous_response_id="resp_1")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_can_t_be_kept_is_told_and_says_so(
    url: str, tokenizer: ChatTokenizer, stream: bool
) -> None:
    async with one_of(url, tokenizer, replace(LIMITS, content_bytes=100)) as one:
        found = await asked(one, "x", stream=stream)
        told = [event async for event in found][-1].response if stream else found
        assert (told.status, told.store, told.output_text) == ("completed", False, TEXT)
        with pytest.raises(openai.NotFoundError):
            await one.openai.responses.retrieve(told.id)


async def test_without_nats_answers_come_and_nothing_else_does(url: str, tokenizer: ChatTokenizer) -> None:
    async with one_of(url, tokenizer) as one:
        kept = await asked(one, "x")
        conversation = await one.openai.conversations.create()
        await one.kept._streams._client.close()
        assert not (await asked(one, "x")).store
        for act in (
            one.openai.responses.retrieve(kept.id),
            asked(one, "x", previous_response_id=kept.id),
            asked(one, "x", conversation=conversation.id),
            asked(one, "x", background=True),
            one.openai.conversations.create(),
        ):
            with pytest.raises(openai.InternalServerError) as refused:
                await act
            assert refused.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_its_conversation_has_lost_room_for_fails(
    here: One, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = await here.openai.conversations.create()
    monkeypatch.setattr(conversations, "TURN_BYTES", 50)
    if not stream:
        with pytest.raises(openai.BadRequestError, match="shorten it"):
            await asked(here, "x", conversation=conversation.id)
        return
    events = [event async for event in await asked(here, "x", conversation=conversation.id, stream=True)]
    assert events[-1].type == "response.failed"
    assert (await here.openai.conversations.items.list(conversation.id)).data == []


async def test_what_was_shortened_to_a_compaction_is_read_no_more(here: One) -> None:
    first = await asked(here, ASKED[0])
    shortened = await asked(here, [{"type": "compaction_trigger"}], previous_response_id=first.id)
    assert [item.type for item in shortened.output] == ["compaction"]
    await asked(here, ASKED[1], previous_response_id=shortened.id)
    await asked(here, [shortened.output[0].model_dump(exclude_none=True), {"role": "user", "content": ASKED[1]}])
    assert prompts(here)[2] == prompts(here)[3]
