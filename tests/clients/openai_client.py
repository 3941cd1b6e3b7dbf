"""openai-python: tools, structured output, reasoning, streams."""

from __future__ import annotations

import json
from typing import Any

import openai
from cases import BASE_URL, GET_WEATHER, MODEL, PERSON, WEATHER, case, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
ask: Any = client.chat.completions.create


class Person(BaseModel):
    name: str
    age: int


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@case("chat, whole")
def whole() -> None:
    answer = ask(model=MODEL, messages=said("What is the capital of France?"), temperature=0)
    assert "Paris" in answer.choices[0].message.content


@case("chat, two turns with the message object")
def two_turns() -> None:
    first = ask(model=MODEL, messages=said("Hello!"), temperature=0)
    messages = [*said("Hello!"), first.choices[0].message, *said("What is 2 + 2?")]
    assert "4" in ask(model=MODEL, messages=messages, temperature=0).choices[0].message.content


@case("tools: a call, its result, the answer")
def tools() -> None:
    first = ask(model=MODEL, messages=said(WEATHER), tools=[GET_WEATHER], temperature=0).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18, "sky": "sunny"}'}
    second = ask(model=MODEL, messages=[*said(WEATHER), first.message, result], tools=[GET_WEATHER], temperature=0)
    assert "sunny" in second.choices[0].message.content


@case("tools, streamed")
def tools_streamed() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=said(WEATHER),
        tools=[openai.pydantic_function_tool(Weather, name="get_weather")],
        temperature=0,
    ) as stream:
        events = list(stream)
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert any(event.type == "tool_calls.function.arguments.delta" for event in events)
    assert json.loads(call.function.arguments) == {"city": "Paris"}


class Weather(BaseModel):
    city: str


@case("tool_choice: required, and one function by name")
def forced() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = ask(model=MODEL, messages=said("Hello!"), tools=[GET_WEATHER], tool_choice=choice, max_tokens=60)
        for call in answer.choices[0].message.tool_calls:
            assert call.function.name == "get_weather"
            assert set(json.loads(call.function.arguments)) == {"city"}


@case("tool_choice: none")
def no_tools() -> None:
    answer = ask(model=MODEL, messages=said(WEATHER), tools=[GET_WEATHER], tool_choice="none", max_tokens=30)
    assert not answer.choices[0].message.tool_calls


@case("parse: a pydantic model")
def parse() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=said(PERSON), response_format=Person, temperature=0)
    assert parsed.choices[0].message.parsed == Person(name="Anna", age=25)


@case("response_format: json_object")
def json_object() -> None:
    answer = ask(model=MODEL, messages=said("Hello!"), response_format={"type": "json_object"}, max_tokens=200)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@case("structured_outputs: choice and regex")
def choice() -> None:
    question = "Is this positive or negative? I love tea."
    options = {"structured_outputs": {"choice": ["positive", "negative"]}}
    assert ask(model=MODEL, messages=said(question), extra_body=options).choices[0].message.content in (
        "positive",
        "negative",
    )
    options = {"structured_outputs": {"regex": "[0-9]{3}"}}
    assert len(ask(model=MODEL, messages=said("A number?"), extra_body=options).choices[0].message.content) == 3


@case("reasoning, whole and streamed")
def reasoning() -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = ask(model=MODEL, messages=said("What is 7 + 5?"), temperature=0, extra_body=thinking)
    assert "add 7 and 5" in answer.choices[0].message.reasoning_content
    assert answer.choices[0].message.content.strip() == "7 + 5 = 12."
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    thoughts = text = ""
    for chunk in ask(model=MODEL, messages=said("What is 7 + 5?"), temperature=0, stream=True, extra_body=thinking):
        for one in chunk.choices:
            thoughts += getattr(one.delta, "reasoning_content", None) or ""
            text += one.delta.content or ""
    assert thoughts == answer.choices[0].message.reasoning_content
    assert text == answer.choices[0].message.content


@case("a prompt that is too long is a context error")
def too_long() -> None:
    problem = None
    try:
        ask(model=MODEL, messages=said("word " * 4000))
    except openai.BadRequestError as error:
        problem = error
    assert problem is not None, "it was accepted"
    assert problem.code == "context_length_exceeded"
    assert "maximum context length" in str(problem)


run()
