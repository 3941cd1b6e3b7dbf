"""openai-python's Responses API: whole, streamed, parsed, tools, reasoning, counts; each event checked by its types."""

from __future__ import annotations

import json
from typing import Any

import openai
from cases import BASE_URL, GET_WEATHER, MODEL, PERSON, WEATHER, case, run
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

client: Any = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
FUNCTION: Any = {"type": "function", **GET_WEATHER["function"], "strict": False}
FRANCE = "What is the capital of France?"
HAIKU: Any = {
    "type": "custom",
    "name": "write",
    "description": "Write a word",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]{1,8}"},
}


class Person(BaseModel):
    name: str
    age: int


def ask(**fields: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": FRANCE, "temperature": 0} | fields)


def events_of(**fields: Any) -> list[dict[str, Any]]:
    """The events of a stream as they came, each as OpenAI's types have it."""
    body = {"model": MODEL, "input": FRANCE, "temperature": 0, "stream": True} | fields
    events, check = [], TypeAdapter(ResponseStreamEvent)
    with client.responses.with_streaming_response.create(**body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                check.validate_python(events[-1], strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    return events


@case("a response, whole")
def whole() -> None:
    answer = ask(instructions="Be brief.", metadata={"a": "b"})
    Response.model_validate(answer.to_dict(), strict=False)
    assert (answer.status, answer.metadata) == ("completed", {"a": "b"})
    assert "Paris" in answer.output_text


@case("a response, streamed, each event by OpenAI's types")
def streamed() -> None:
    events = events_of()
    assert events[-1]["type"] == "response.completed"
    assert "Paris" in "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


@case("the stream helper")
def helper() -> None:
    with client.responses.stream(model=MODEL, input=FRANCE, temperature=0) as stream:
        kinds = {event.type for event in stream}
        assert "Paris" in stream.get_final_response().output_text
    assert "response.output_text.delta" in kinds


@case("two turns with the output's items")
def two_turns() -> None:
    first = ask(input="Hello!")
    history = [{"role": "user", "content": "Hello!"}, *first.output, {"role": "user", "content": "What is 2 + 2?"}]
    assert "4" in ask(input=history).output_text


@case("tools: a call, its result, the answer")
def tools() -> None:
    first = ask(input=WEATHER, tools=[FUNCTION])
    call = first.output[-1]
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 18, "sky": "sunny"}'}
    history = [{"role": "user", "content": WEATHER}, *first.output, result]
    assert "sunny" in ask(input=history, tools=[FUNCTION]).output_text


@case("tools, streamed")
def tools_streamed() -> None:
    events = events_of(input=WEATHER, tools=[FUNCTION], tool_choice="required")
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"city": "Paris"}


@case("a custom tool with a grammar, required")
def custom() -> None:
    events = events_of(input="Say hello.", tools=[HAIKU], tool_choice="required", max_output_tokens=200)
    item = events[-1]["response"]["output"][-1]
    assert item["type"] == "custom_tool_call"
    assert item["input"].isalpha()
    assert len(item["input"]) <= 8


@case("parse: an object by schema")
def parsed() -> None:
    answer = client.responses.parse(model=MODEL, input=PERSON, text_format=Person, temperature=0)
    assert answer.output_parsed == Person(name="Anna", age=25)


@case("reasoning comes, sealed as well, and goes back")
def reasoning() -> None:
    include = ["reasoning.encrypted_content"]
    first = ask(reasoning={"effort": "low"}, include=include, store=False)
    assert first.output[0].type == "reasoning"
    assert first.output[0].encrypted_content
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    history = [{"role": "user", "content": FRANCE}, *first.output, {"role": "user", "content": "What is 2 + 2?"}]
    assert "4" in ask(input=history, include=include, reasoning={"effort": "none"}).output_text
    events = events_of(reasoning={"effort": "low", "summary": "auto"})
    assert any(event["type"] == "response.reasoning_summary_text.delta" for event in events)


@case("an answer that runs out of tokens is incomplete")
def incomplete() -> None:
    last = events_of(max_output_tokens=2)[-1]
    assert (last["type"], last["response"]["incomplete_details"]) == (
        "response.incomplete",
        {"reason": "max_output_tokens"},
    )


@case("logprobs")
def logprobs() -> None:
    part = ask(include=["message.output_text.logprobs"], top_logprobs=2).output[-1].content[0]
    assert "".join(token.token for token in part.logprobs) == part.text
    assert len(part.logprobs[0].top_logprobs) == 2


@case("input tokens are counted, a conversation is shortened")
def counted() -> None:
    count = client.responses.input_tokens.count(model=MODEL, input=FRANCE).input_tokens
    assert count == ask().usage.input_tokens
    shorter = client.responses.compact(model=MODEL, input=[{"role": "user", "content": FRANCE}])
    assert shorter.output[-1].type == "compaction"


@case("what can't be served is refused by name")
def refused() -> None:
    for fields, param in (({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools"), ({"n": 2}, "n")):
        error = problem_of(fields)
        assert error is not None
        assert error.param == param


def problem_of(fields: dict[str, Any]) -> openai.BadRequestError | None:
    try:
        ask(extra_body=fields)
    except openai.BadRequestError as error:
        return error
    return None


run()
