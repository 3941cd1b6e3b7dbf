"""anthropic-sdk-python: messages whole and streamed, tools, thinking, structured output; then as Claude Code asks."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import anthropic
from anthropic.types import RawMessageStreamEvent
from cases import BASE_URL, GET_WEATHER, MODEL, PERSON, WEATHER, case, run
from pydantic import BaseModel, TypeAdapter

HOST = BASE_URL.removesuffix("/v1")
client = anthropic.Anthropic(base_url=HOST, api_key="none", max_retries=0)
CALLED = GET_WEATHER["function"]
TOOL: Any = {"name": "get_weather", "description": CALLED["description"], "input_schema": CALLED["parameters"]}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
MARK: Any = {"cache_control": {"type": "ephemeral"}}
EVENT: Any = TypeAdapter(RawMessageStreamEvent)


class Person(BaseModel):
    name: str
    age: int


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def asked(messages: list[Any], **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 200, "messages": messages} | options


def check_stream(**options: Any) -> list[Any]:
    """Raw events, each valid by the SDK's types strictly, without a field that they don't know."""
    with client.messages.with_streaming_response.create(**options, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    found = []
    for name, line in zip(names, lines[1::2], strict=True):
        if name != "ping":
            found.append(EVENT.validate_json(line.removeprefix("data: "), strict=True))
            assert found[-1].type == name
            no_extra(found[-1])
    assert (names[0], names[1], names[-2:]) == ("message_start", "ping", ["message_delta", "message_stop"])
    return found


def no_extra(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} has {value.model_extra}"
        for name in type(value).model_fields:
            no_extra(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            no_extra(one)


@case("messages, whole")
def whole() -> None:
    answer = client.messages.create(**asked(said("What is the capital of France?")))
    no_extra(answer)
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason == "end_turn"
    assert answer._request_id


@case("messages.stream, two turns with the message object")
def stream() -> None:
    with client.messages.stream(**asked(said("Hello!"))) as streamed:
        text = "".join(streamed.text_stream)
        first = streamed.get_final_message()
    assert text == first.content[0].text
    assert first.usage.output_tokens > 0
    messages = [*said("Hello!"), {"role": "assistant", "content": first.content}, *said("What is 2 + 2?")]
    assert "4" in client.messages.create(**asked(messages)).content[0].text


@case("raw events by the SDK's types, strictly: text, thinking, a call")
def strict() -> None:
    check_stream(**asked(said("Hello!"), system=[{"type": "text", "text": "Be brief.", **MARK}]))
    thought = check_stream(**asked(said("What is 7 + 5?"), max_tokens=1100, thinking=THINKING))
    deltas = [event.delta.type for event in thought if event.type == "content_block_delta" and event.index == 0]
    assert (deltas[0], deltas[-1]) == ("thinking_delta", "signature_delta")
    called = check_stream(**asked(said(WEATHER), tools=[TOOL]))
    assert called[-2].delta.stop_reason == "tool_use"


@case("tools: a call streamed, its result, the answer")
def tools() -> None:
    with client.messages.stream(**asked(said(WEATHER), tools=[TOOL])) as streamed:
        kinds = {event.type for event in streamed}
        first = streamed.get_final_message()
    assert "input_json" in kinds
    call = first.content[-1]
    assert (first.stop_reason, call.type, call.input) == ("tool_use", "tool_use", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 18, "sky": "sunny"}'}
    messages = [*said(WEATHER), {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert "sunny" in client.messages.create(**asked(messages, tools=[TOOL])).content[0].text


@case("beta: tool_runner")
def tool_runner() -> None:
    cities = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        cities.append(city)
        return '{"temperature": 18, "sky": "sunny"}'

    runner: Any = client.beta.messages.tool_runner(**asked(said(WEATHER), tools=[get_weather]))
    last = runner.until_done()
    assert cities == ["Paris"]
    assert last.stop_reason == "end_turn"


@case("tool_choice: any, tool, none")
def forced() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = client.messages.create(**asked(said("Hello!"), tools=[TOOL], tool_choice=choice))
        assert [(block.type, set(block.input)) for block in answer.content if block.type == "tool_use"] == [
            ("tool_use", {"city"})
        ]
    answer = client.messages.create(**asked(said(WEATHER), tools=[TOOL], tool_choice={"type": "none"}))
    assert "tool_use" not in [block.type for block in answer.content]


@case("thinking, sent back in a second turn")
def thinking() -> None:
    question = said("What is 7 + 5?")
    first = client.messages.create(**asked(question, max_tokens=1100, thinking=THINKING))
    thought, answer = first.content
    assert "add 7 and 5" in thought.thinking
    assert answer.text.strip() == "7 + 5 = 12."
    assert first.usage.output_tokens_details.thinking_tokens > 0
    messages = [*question, {"role": "assistant", "content": first.content}, *said("What is 2 + 2?")]
    assert client.messages.create(**asked(messages)).content


@case("messages.parse: a pydantic model")
def parse() -> None:
    answer = client.messages.parse(**asked(said(PERSON), output_format=Person))
    assert answer.parsed_output == Person(name="Anna", age=25)


@case("stop_sequences, prefill")
def stops() -> None:
    answer = client.messages.create(**asked(said("What is the capital of France?"), stop_sequences=["Paris"]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")
    begun = {"role": "assistant", "content": "The capital of France is"}
    assert "Paris" in client.messages.create(**asked([*said("What is the capital of France?"), begun])).content[0].text


@case("count_tokens is what usage says")
def count() -> None:
    options = {"system": "Be brief.", "tools": [TOOL]}
    counted = client.messages.count_tokens(model=MODEL, messages=said("Hello!"), **options)
    usage = client.messages.create(**asked(said("Hello!"), **options)).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@case("models, and errors of their own classes")
def others() -> None:
    listed = client.models.list()
    assert MODEL in [model.id for model in listed]
    assert client.models.retrieve(MODEL).type == "model"
    for wrong in (asked(said("word " * 4000)), asked(said("Hello!"), tool_choice={"type": "tool", "name": "none"})):
        problem = None
        try:
            client.messages.create(**wrong)
        except anthropic.BadRequestError as error:
            problem = error
        assert problem is not None, "it was accepted"
        assert problem.body["error"]["type"] == "invalid_request_error"
        assert problem.request_id


@case("as Claude Code: a nonce, 30 tools, cache marks, counts, side requests to a small model")
def agent() -> None:
    asyncio.run(_agent())


async def _agent() -> None:
    asking: Any = anthropic.AsyncAnthropic(base_url=HOST, auth_token="none", max_retries=0)
    short = {"type": "object", "properties": {"path": {"type": "string"}}}
    many: list[Any] = [
        {"name": f"tool_{index}", "description": "Use it.", "input_schema": short} for index in range(30)
    ]
    many[-1] |= MARK

    def turn(messages: list[Any]) -> dict[str, Any]:
        nonce = f"x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch={uuid.uuid4().hex[:5]};"
        system = [{"type": "text", "text": nonce}, {"type": "text", "text": "You are an agent.", **MARK}]
        last = {"role": "user", "content": [{"type": "text", "text": messages[-1]["content"], **MARK}]}
        return {
            "model": MODEL, "max_tokens": 32_000, "system": system, "tools": many, "messages": [*messages[:-1], last],
            "metadata": {"user_id": "user"}, "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        }  # fmt: skip

    async def told(options: dict[str, Any]) -> Any:
        async with asking.beta.messages.stream(**options) as streamed:
            return await streamed.get_final_message()

    counted = {name: value for name, value in turn(said("Hello!")).items() if name not in ("max_tokens", "metadata")}
    side = {"model": "claude-haiku-4-5", "max_tokens": 30, "messages": said("Hello!")}
    first, count, *sides = await asyncio.gather(
        told(turn(said("Hello!"))),
        asking.beta.messages.count_tokens(**counted),
        *(asking.messages.create(**side) for _ in range(3)),
    )
    prompt = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert count.input_tokens == prompt
    assert {answer.model for answer in sides} == {"claude-haiku-4-5"}
    messages = [*said("Hello!"), {"role": "assistant", "content": first.content}, *said("What is 2 + 2?")]
    second = await told(turn(messages))
    assert second.usage.cache_read_input_tokens > prompt - 64, second.usage


run()
