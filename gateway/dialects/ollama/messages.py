"""The messages of a chat in Ollama's form: calls and their results may lack ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictStr, field_validator

from gateway.dialects.openai.messages import MAX_CALLS, Id, ToolCall
from gateway.http.fields import LenientFields

ONLY_TEXT = "only text is read: leave images out"


class OllamaMessage(LenientFields):
    """One message of a chat."""

    schemas: ClassVar[dict[str, dict[str, Any]]] = {"images": {"type": ["array", "null"], "maxItems": 0, "items": {}}}

    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr = ""
    thinking: StrictStr | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_name: StrictStr | None = None
    tool_call_id: Id | None = None

    @field_validator("images")
    @classmethod
    def _none(cls, images: list[Any]) -> list[Any]:
        if images:
            raise ValueError(ONLY_TEXT)
        return images


def template_input(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the form that chat templates expect. A call without an id gets one, and so does its result."""
    waiting: deque[tuple[str, str]] = deque()  # name and id of unanswered calls
    number, found = 0, list[dict[str, Any]]()
    for message in messages:
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "assistant" and message.tool_calls:
            calls = []
            for call in message.tool_calls:
                number += 1
                call_id = call.id or f"call{number:05}"  # nine letters and digits: Mistral's templates require it
                waiting.append((call.function.name, call_id))
                calls.append({"id": call_id, "type": "function", "function": call.function.as_template_input()})
            plain["tool_calls"] = calls
        if message.role == "assistant" and message.thinking:
            plain |= {"reasoning_content": message.thinking, "thinking": message.thinking}  # families differ
        if message.role == "tool":
            plain |= _answered(message, waiting)
        found.append(plain)
    return found


def _answered(message: OllamaMessage, waiting: deque[tuple[str, str]]) -> dict[str, str]:
    """A result's name and id: its own, else those of the first unanswered call that matches."""
    suits = (
        call
        for call in waiting
        if message.tool_call_id in (None, call[1]) and (message.tool_call_id or message.tool_name in (None, call[0]))
    )
    call = next(suits, None)
    if call is not None:
        waiting.remove(call)
    name = message.tool_name or (call[0] if call is not None else None)
    call_id = message.tool_call_id or (call[1] if call is not None else None)
    return {key: value for key, value in (("name", name), ("tool_call_id", call_id)) if value}
