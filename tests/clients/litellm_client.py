"""litellm: two turns by its documented way, tools, structured output, its own error classes."""

from __future__ import annotations

import json
from typing import Any

import litellm
from cases import BASE_URL, GET_WEATHER, MODEL, PERSON, WEATHER, case, run

litellm.telemetry = False


def ask(messages: list[Any], **options: Any) -> Any:
    return litellm.completion(
        model=f"hosted_vllm/{MODEL}",
        api_base=BASE_URL,
        api_key="none",
        messages=messages,
        **({"temperature": 0} | options),
    )


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@case("two turns with the message object")
def two_turns() -> None:
    messages: list[Any] = [said("My name is Anna.")]
    messages.append(ask(messages).choices[0].message)
    messages.append(said("What is my name?"))
    assert "Anna" in ask(messages).choices[0].message.content


@case("tools, with the result in a second turn")
def tools() -> None:
    messages: list[Any] = [said(WEATHER)]
    message = ask(messages, tools=[GET_WEATHER]).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny, 18 C"}]
    assert "sunny" in ask(messages, tools=[GET_WEATHER]).choices[0].message.content


@case("tools, streamed")
def tools_streamed() -> None:
    chunks = list(ask([said(WEATHER)], tools=[GET_WEATHER], stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}


@case("response_format: json_schema")
def schema() -> None:
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    wanted = {"type": "object", "properties": properties, "required": ["name", "age"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": wanted}}
    answer = ask([said(PERSON)], response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"name": "Anna", "age": 25}


@case("a context error has its own class")
def context() -> None:
    try:
        ask([said("word " * 4000)])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no ContextWindowExceededError")


run()
