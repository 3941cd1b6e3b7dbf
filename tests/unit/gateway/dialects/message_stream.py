"""A reader of Anthropic's streams that takes nothing but what its SDKs' types allow, in the order that they want."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]
USAGE = {
    "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens", "output_tokens_details",
}  # fmt: skip
MESSAGE = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
BLOCKS = {
    "text": {"type", "text"},
    "thinking": {"type", "thinking", "signature"},
    "tool_use": {"type", "id", "name", "input"},
}
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}


def events_of(text: str) -> list[Json]:
    """The events of a stream, each named as its data says."""
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        said = json.loads(data.removeprefix("data: "))
        assert name == f"event: {said['type']}"
        found.append(said)
    return found


def message_of(text: str) -> Json:
    """The message that a whole stream says; its order and fields are checked."""
    first, *rest, delta, last = [event for event in events_of(text) if event != {"type": "ping"}]
    assert (first.keys(), first["type"]) == ({"type", "message"}, "message_start")
    message = first["message"]
    assert message.keys() == MESSAGE
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    while rest:
        rest = _block(message["content"], rest)
    assert delta.keys() == {"type", "delta", "usage"}
    assert delta["delta"].keys() == {"stop_reason", "stop_sequence"}
    assert delta["usage"].keys() == USAGE
    assert last == {"type": "message_stop"}
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def _block(content: list[Json], events: list[Json]) -> list[Json]:
    """Read one block from its start to its stop; return what is left."""
    index, start = len(content), events[0]
    assert (start["type"], start["index"]) == ("content_block_start", index)
    block = start["content_block"]
    assert block.keys() == BLOCKS[block["type"]]
    end = next(place for place, event in enumerate(events) if event["type"] == "content_block_stop")
    assert events[end] == {"type": "content_block_stop", "index": index}
    deltas = [event["delta"] for event in events[1:end]]
    said: dict[str, str] = {}
    for event, delta in zip(events[1:end], deltas, strict=True):
        assert (event.keys(), event["index"]) == ({"type", "index", "delta"}, index)
        kind, name = DELTAS[delta["type"]]
        assert (kind, delta.keys()) == (block["type"], {"type", name})
        said[name] = said.get(name, "") + delta[name]
    kinds = [delta["type"] for delta in deltas]
    assert kinds.count("signature_delta") == (block["type"] == "thinking")
    assert block["type"] != "thinking" or kinds[-1] == "signature_delta"
    if "partial_json" in said:
        block["input"] = json.loads(said.pop("partial_json"))
    content.append(block | said)
    return events[end + 1 :]
