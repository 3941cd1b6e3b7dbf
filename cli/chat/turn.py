"""One streamed answer of a chat: its text, thoughts and calls, put together from deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    """A function that the model wants called; `arguments` is JSON."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def as_message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class Turn:
    """What an answer holds so far."""

    text: str = ""
    thoughts: str = ""
    calls: dict[int, Call] = field(default_factory=dict)  # by their index

    def take(self, delta: dict[str, Any]) -> str:
        """Add a chunk's delta; return the text to show."""
        self.thoughts += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            call = self.calls.setdefault(part["index"], Call())
            function = part.get("function") or {}
            call.id += part.get("id") or ""
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""
        text = str(delta.get("content") or "")
        self.text += text
        return text

    def as_message(self) -> dict[str, Any]:
        """The assistant's message for the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call.as_message() for _, call in sorted(self.calls.items())]
        return message
