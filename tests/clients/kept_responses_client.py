"""openai-agents and its openai-python: what the Responses API keeps."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
from agents import (
    Agent,
    OpenAIConversationsSession,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from cases import BASE_URL, MODEL, WEATHER, case, run

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
ask: Any = client.responses.create
TURNS = ("What is the capital of France?", "What is 2 + 2?", "Hello!")
LONG = "Write a long story."


def ended(response_id: str) -> Any:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = client.responses.retrieve(response_id)
        if found.status not in ("queued", "in_progress"):
            return found
        time.sleep(0.05)
    raise TimeoutError(response_id)


def refused(kind: type[Exception], act: Any) -> None:
    try:
        act()
    except kind:
        return
    raise AssertionError(f"not refused with {kind.__name__}")


@case("previous_response_id: three turns as if all was sent")
def chained() -> None:
    items: list[Any] = []
    previous = None
    for text in TURNS:
        answer = ask(model=MODEL, input=text, previous_response_id=previous, temperature=0, max_output_tokens=64)
        items.append({"role": "user", "content": text})
        whole = ask(model=MODEL, input=items, store=False, temperature=0, max_output_tokens=64)
        assert answer.store
        assert not whole.store
        assert (answer.output_text, answer.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        previous = answer.id
    assert client.responses.retrieve(answer.id) == answer
    assert client.responses.input_items.list(answer.id).data[0].content[0].text == TURNS[-1]  # type: ignore[union-attr]
    client.responses.delete(answer.id)
    refused(openai.NotFoundError, lambda: client.responses.retrieve(answer.id))
    refused(openai.BadRequestError, lambda: ask(model=MODEL, input="x", previous_response_id=answer.id))


@case("a conversation: items, three turns, deleted")
def conversation() -> None:
    begun = client.conversations.create(metadata={"topic": "demo"}, items=[{"role": "user", "content": "Hello!"}])
    for text in TURNS[:2]:
        answer = ask(model=MODEL, input=text, conversation=begun.id, temperature=0, max_output_tokens=64)
    items = list(client.conversations.items.list(begun.id, order="asc", limit=2))
    assert [item.id for item in items[-len(answer.output) :]] == [item.id for item in answer.output]
    assert len(items) > 4
    assert client.conversations.items.retrieve(items[0].id, conversation_id=begun.id) == items[0]
    client.conversations.items.delete(items[0].id, conversation_id=begun.id)
    assert client.conversations.update(begun.id, metadata={"topic": "other"}).metadata == {"topic": "other"}
    assert client.conversations.delete(begun.id).deleted
    refused(openai.NotFoundError, lambda: client.conversations.retrieve(begun.id))


@case("background: polled, gone on from")
def background() -> None:
    queued = ask(model=MODEL, input=TURNS[0], background=True, temperature=0, max_output_tokens=64)
    assert queued.status == "queued"
    done = ended(queued.id)
    assert done.status in ("completed", "incomplete"), done.error
    assert "Paris" in done.output_text
    ask(model=MODEL, input=TURNS[1], previous_response_id=done.id, max_output_tokens=16)


@case("background: cancelled")
def cancelled() -> None:
    queued = ask(model=MODEL, input=LONG, background=True, max_output_tokens=2_000, extra_body={"ignore_eos": True})
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert ended(queued.id).status == "cancelled"


@case("background: a stream that is lost and taken up again")
def resumed() -> None:
    stream = ask(model=MODEL, input=TURNS[0], background=True, stream=True, temperature=0, max_output_tokens=64)
    first = [next(stream) for _ in range(4)]
    stream.close()
    response_id, number = first[0].response.id, first[-1].sequence_number
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=number))
    assert [event.sequence_number for event in rest] == list(range(number + 1, number + 1 + len(rest)))
    assert rest[-1].type in ("response.completed", "response.incomplete")
    again = list(client.responses.retrieve(response_id, stream=True))
    assert again == [*first, *rest]
    said = "".join(event.delta for event in again if event.type == "response.output_text.delta")
    assert said == rest[-1].response.output_text == client.responses.retrieve(response_id).output_text


@case("OpenAIConversationsSession: an agent with a tool, two turns")
def session() -> None:
    set_tracing_disabled(True)
    set_default_openai_client(openai.AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0))

    @function_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return '{"temperature": 18, "sky": "sunny"}'

    async def talk() -> None:
        agent, kept = Agent(name="demo", model=MODEL, tools=[get_weather]), OpenAIConversationsSession()
        first = await Runner.run(agent, WEATHER, session=kept)
        assert "sunny" in first.final_output, first.final_output
        items = await kept.get_items()
        assert [item.get("type", "message") for item in items if item.get("type") != "reasoning"] == [
            "message",
            "function_call",
            "function_call_output",
            "message",
        ]
        await Runner.run(agent, "Hello!", session=kept)
        assert (await kept.pop_item()) is not None
        await kept.clear_session()

    asyncio.run(talk())


if __name__ == "__main__":
    run()
