"""Streams of responses as OpenAI's own types check them."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_ENDS = ("response.completed", "response.incomplete", "response.failed")
Json = dict[str, Any]


def events_of(stream: bytes | str) -> list[Json]:
    """The events of a stream that follows all rules: names, numbers, types, order, and items as they were told before."""
    text = stream.decode() if isinstance(stream, bytes) else stream
    events = []
    for number, frame in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        _EVENT.validate_python(event, strict=True)
        events.append(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] for event in events if event["type"] in _ENDS] == [events[-1]["type"]]
    check_items(events)
    return events


def check_items(events: list[Json]) -> None:
    """Each item is announced, grows by deltas, and is done as the last response has it."""
    last = response_of(events[-1]["response"])
    told: dict[int, list[Json]] = {}
    for event in events[2:-1]:
        if "output_index" in event:
            told.setdefault(event["output_index"], []).append(event)
    assert list(told) == list(range(len(last["output"])))
    for index, item in enumerate(last["output"]):
        added, *between, done = told[index]
        assert added["type"] == "response.output_item.added"
        assert {name: added["item"].get(name) for name in ("id", "type", "call_id", "name")} == {
            name: item.get(name) for name in ("id", "type", "call_id", "name")
        }
        assert all(event["item_id"] == item["id"] for event in between)
        if events[-1]["type"] != "response.failed":
            assert (done["type"], done["item"]) == ("response.output_item.done", item)
            assert "".join(event["delta"] for event in between if "delta" in event) == text_of(item)


def text_of(item: Json) -> str:
    """What deltas add up to."""
    match item["type"]:
        case "message":
            return str(item["content"][0]["text"])
        case "reasoning":
            return str([*item["content"], *item["summary"]][0]["text"])
        case "function_call":
            return str(item["arguments"])
        case "custom_tool_call":
            return str(item["input"])
    return ""


def response_of(whole: Json) -> Json:
    """A `Response` that OpenAI's type takes as it is."""
    Response.model_validate(whole, strict=True)
    return whole
