"""Content blocks of clients' messages, and their meaning for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
# Claude Code's first system text: it changes with each request, and would break the prefix cache for everything after it.
_NONCE_LINE = "x-anthropic-billing-header:"
_FAILURES = ("error", "<tool_use_error>")  # prefixes of results that describe their own failure
_REMEDIES = {
    "image": "only text is read: remove it, or describe it in a text block",
    "document": "only text is read: send its text in a text block",
    "search_result": "only text is read: send what was found in a text block",
    "tool_addition": "send the tools in `tools`",
    "tool_removal": "leave the tool out of `tools`",
    "compaction": "send what it sums up in a text block",
}


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning of an earlier answer. Signatures are not stored: any is accepted."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call of an earlier answer; `input` is the arguments' object."""

    id: str
    name: str
    input: Json


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, as text."""

    id: str
    text: str


Block = Text | Thinking | ToolUse | ToolResult


def blocks_of(content: Any) -> list[Block]:
    """The blocks of a message's `content`. Raises ValueError that begins with a block's index."""
    if isinstance(content, str):
        return [Text(content)] if content else []
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of blocks")
    found: list[Block] = []
    for index, raw in enumerate(content):
        try:
            block = _block(raw)
        except ValueError as error:
            raise ValueError(f"{index}: {error}") from None
        if block is not None:
            found.append(block)
    return found


def system_text(texts: Iterable[str]) -> str:
    """The system texts as one, without parts that change from request to request."""
    return joined(_lasting(text) for text in texts)


def joined(texts: Iterable[str]) -> str:
    """Text blocks as one text, a paragraph each."""
    return "\n".join(text for text in texts if text)


def _lasting(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_NONCE_LINE) else text


def _block(raw: Any) -> Block | None:
    """Parse a block; None if it means nothing to the model. Raises ValueError."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
        raise ValueError("a block must be an object with a type")
    kind = raw["type"]
    read = _READERS.get(kind)
    if read is None:
        raise ValueError(f"{kind!r} blocks are not supported: {_REMEDIES.get(kind, 'send its text in a text block')}")
    return read(raw)


def _text(raw: Mapping[str, Any]) -> Text | None:
    text = _string(raw, "text")
    return Text(text) if text else None


def _tool_use(raw: Mapping[str, Any]) -> ToolUse:
    given = raw.get("input", {})
    if not isinstance(given, dict):
        raise ValueError("input: must be an object")
    return ToolUse(_string(raw, "id"), _string(raw, "name"), given)


def _tool_result(raw: Mapping[str, Any]) -> ToolResult:
    content, is_error = raw.get("content") or "", raw.get("is_error") or False
    if not isinstance(is_error, bool):
        raise ValueError("is_error: must be true or false")
    text = content if isinstance(content, str) else joined(map(_result_text, _parts(content)))
    if is_error and not text.lower().startswith(_FAILURES):
        text = f"Error: {text}"
    return ToolResult(_string(raw, "tool_use_id"), text)


def _parts(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("content: must be a string or a list of blocks")
    return content


def _result_text(raw: Any) -> str:
    """Text of a part of a result. A tool reference becomes its name: all tools are in the prompt."""
    if isinstance(raw, Mapping) and raw.get("type") == "tool_reference":
        return _string(raw, "tool_name")
    block = _block(raw)
    if block is not None and not isinstance(block, Text):
        raise ValueError(f"content: a {raw['type']} block can't be in a result")
    return block.text if block is not None else ""


def _string(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a string")
    return value


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Block | None]] = {
    "text": _text,
    "thinking": lambda raw: Thinking(_string(raw, "thinking")),
    "redacted_thinking": lambda raw: None,  # only its maker can read it
    "tool_use": _tool_use,
    "tool_result": _tool_result,
}
