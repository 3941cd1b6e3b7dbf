"""Conversion of block messages to the messages of chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from gateway.answers.ask import thoughts_as
from gateway.dialects.anthropic.blocks import Block, Text, Thinking, ToolResult, ToolUse, joined, system_text

Json = dict[str, Any]


class Turn(NamedTuple):
    """A message: its role and its blocks."""

    role: Literal["user", "assistant", "system"]
    blocks: Sequence[Block]


def template_messages(system: str, turns: Iterable[Turn]) -> list[Json]:
    """`system` first, then all turns in order: a system turn stays in place, so that the prefix before it is a cache hit.

    Turns of one role that follow each other are one message, as templates want them by turns. Raises ValueError.
    """
    found: list[Json] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}  # tools' names by call id
    for index, turn in enumerate(turns):
        try:
            _CONVERTED[turn.role](found, turn.blocks, names)
        except ValueError as error:
            raise ValueError(f"messages: {index}: {error}") from None
    return found


def _system(found: list[Json], blocks: Sequence[Block], names: dict[str, str]) -> None:
    _only(blocks, Text, role="system")
    text = system_text(block.text for block in blocks if isinstance(block, Text))
    if text:
        found.append({"role": "system", "content": text})


def _user(found: list[Json], blocks: Sequence[Block], names: dict[str, str]) -> None:
    _only(blocks, Text, ToolResult, role="user")
    if not blocks:
        _add_text(found, "")
    for block in blocks:
        if isinstance(block, Text):
            _add_text(found, block.text)
        elif isinstance(block, ToolResult):
            name = {"name": names[block.id]} if block.id in names else {}
            found.append({"role": "tool", "content": block.text, "tool_call_id": block.id} | name)


def _add_text(found: list[Json], text: str) -> None:
    if found and found[-1]["role"] == "user":
        found[-1]["content"] = joined((found[-1]["content"], text))
    else:
        found.append({"role": "user", "content": text})


def _assistant(found: list[Json], blocks: Sequence[Block], names: dict[str, str]) -> None:
    _only(blocks, Text, Thinking, ToolUse, role="assistant")
    if not blocks:
        return
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    names |= {call.id: call.name for call in calls}
    thoughts = "".join(block.text for block in blocks if isinstance(block, Thinking))
    said: Json = {"role": "assistant", "content": "".join(block.text for block in blocks if isinstance(block, Text))}
    if calls:
        said["tool_calls"] = [_call(call) for call in calls]
    if thoughts:
        said |= thoughts_as(thoughts)
    if found and found[-1]["role"] == "assistant":
        found[-1] = _together(found[-1], said)
    else:
        found.append(said)


def _together(first: Json, second: Json) -> Json:
    added = {name: first[name] + value for name, value in second.items() if name != "role" and name in first}
    return first | second | added


def _call(call: ToolUse) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}


def _only(blocks: Iterable[Block], *kinds: type[Block], role: str) -> None:
    """Check a role's blocks. Raises ValueError for one that it can't have."""
    wrong = next((block for block in blocks if not isinstance(block, kinds)), None)
    if wrong is not None:
        named = {Thinking: "thinking", ToolUse: "tool_use", ToolResult: "tool_result", Text: "text"}[type(wrong)]
        raise ValueError(f"a {named} block can't be in a message of role {role}")


_CONVERTED = {"system": _system, "user": _user, "assistant": _assistant}
