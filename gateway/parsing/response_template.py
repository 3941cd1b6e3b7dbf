"""Conversion of tokenizer_config.json's `response_template` (version 1, as in transformers 5) to a format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.parsing.body import PARSERS
from gateway.parsing.format import Exit, Format, Means, State

MAX_FIELDS = 32
_REASONING = ("thinking", "reasoning", "reasoning_content")
_WHOLE_CALLS = (
    "{content}",
    {"name": "{content.name}", "arguments": "{content.arguments}"},
    {"name": "{content.name}", "arguments": "{content.parameters}"},
)
_NAMED_CALL = {"name": "{name}", "arguments": "{content}"}
_LISTED_CALL = ({"name": "{name}", "arguments": "{arguments}"}, {"name": "{name}", "arguments": "{parameters}"})
HOME = "content"


def read_response_template(spec: Any) -> Format:
    """Convert the template. Raises ValueError with the unsupported part."""
    fields = _fields(spec)
    implicit = [name for name, entry in fields.items() if not _terminals(entry, "open")]
    if len(implicit) > 1:
        raise ValueError(f"fields {implicit} have no opening")
    openings = [exit_ for name, entry in fields.items() for exit_ in _openings(name, entry)]
    home = fields[implicit[0]] if implicit else {}
    means = _means(implicit[0]) if implicit else Means.DROP
    states = {HOME: State(means=means, exits=(*openings, *_closings(home)))}
    states |= {f"field {name}": _state(name, entry) for name, entry in fields.items() if name not in implicit}
    opens, closes = _block_of_reasoning(fields)
    has_thoughts = any(_means(name) == Means.REASONING for name in fields)
    return Format(
        name="response_template" if "tool_calls" in fields else "",
        reasoning="response_template" if has_thoughts else "",
        states=states,
        start=HOME,
        opens_reasoning=opens,
        closes_reasoning=closes,
    )


def _block_of_reasoning(fields: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The opening and closing of reasoning, for grammars; empty if either is a pattern."""
    for name in _REASONING:
        entry = fields.get(name, {})
        ends = [_terminals(entry, kind)[:1] for kind in ("open", "close")]
        if all(end and not end[0][1] for end in ends):
            return ends[0][0][0], ends[1][0][0]
    return "", ""


def _openings(name: str, entry: Mapping[str, Any]) -> list[Exit]:
    return [
        Exit(on=on, is_pattern=is_pattern, to=f"field {name}", calls=name == "tool_calls")
        for on, is_pattern in _terminals(entry, "open")
    ]


def _fields(spec: Any) -> Mapping[str, Mapping[str, Any]]:
    fields = spec.get("fields") if isinstance(spec, Mapping) else None
    if not isinstance(fields, Mapping) or not 0 < len(fields) <= MAX_FIELDS:
        raise ValueError("it has no fields")
    if spec.get("version", 1) != 1:
        raise ValueError(f"its version is {spec['version']}; 1 is known")
    for name, entry in fields.items():
        if not isinstance(entry, Mapping) or entry.get("content", "text") not in PARSERS:
            raise ValueError(f"field {name!r} can't be read")
    return fields


def _terminals(entry: Mapping[str, Any], kind: str) -> list[tuple[str, bool]]:
    """The literals, or the pattern, that open or close a field, with a flag for patterns."""
    literals, pattern = entry.get(kind), entry.get(f"{kind}_pattern")
    if pattern is not None:
        return [(str(pattern), True)]
    if literals is None:
        return []
    found = [literals] if isinstance(literals, str) else literals
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"{kind!r} must be a string or a list of strings")
    return [(one, False) for one in found]


def _closings(entry: Mapping[str, Any]) -> list[Exit]:
    return [Exit(on=on, is_pattern=is_pattern, to=HOME) for on, is_pattern in _terminals(entry, "close")]


def _means(name: str) -> Means:
    if name in _REASONING:
        return Means.REASONING
    return Means.CONTENT if name == "content" else Means.DROP


def _state(name: str, entry: Mapping[str, Any]) -> State:
    exits = tuple(_closings(entry))
    if name != "tool_calls":
        return State(means=_means(name), exits=exits)
    args = entry.get("content_args") or {}
    quote = next((opening for opening, closing in args.get("string_delims") or () if opening == closing), "")
    transform = entry.get("transform") or {}
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if entry.get("content") == "json" and not args.get("allow_non_json"):
        if entry.get("transform_each"):
            if function in _LISTED_CALL:
                return State(means=Means.JSON_CALLS, exits=exits, quote=quote)
        elif function == _NAMED_CALL:
            return State(means=Means.JSON, exits=exits, quote=quote, in_call=True)
        elif function in _WHOLE_CALLS:
            return State(means=Means.JSON_CALLS, exits=exits, quote=quote)
    return State(means=Means.BODY, exits=exits, read=entry)
