"""One streamed answer of a chat, assembled from chunks: text, thoughts, calls and pace; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    """A tool call of the model; `arguments` is JSON."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def as_message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class Turn:
    """The answer so far. Instants are seconds of one clock."""

    asked_at: float = 0.0
    text: str = ""
    thoughts: str = ""
    calls: dict[int, Call] = field(default_factory=dict)  # by their index
    error: str = ""
    finish: str = ""
    chunks: int = 0  # chunks with a token
    first_at: float = 0.0
    last_at: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def chunk(self, chunk: dict[str, Any], now: float) -> str:
        """Add a chunk of the stream; return the text to show."""
        if error := chunk.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return ""
        self.usage = chunk.get("usage") or self.usage
        if not chunk.get("choices"):
            return ""
        choice = chunk["choices"][0]
        self.finish = choice.get("finish_reason") or self.finish
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            self.chunks += 1
            self.first_at, self.last_at = self.first_at or now, now
        return self.take(delta)

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

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or self.chunks)

    @property
    def ttft_s(self) -> float:
        return max(0.0, self.first_at - self.asked_at)

    def pace(self) -> str:
        """Time to first token, tokens, tokens a second; "" before the first."""
        if not self.chunks:
            return ""
        parts = [f"first token {self.ttft_s * 1e3:.0f} ms", f"{self.tokens} tokens"]
        if self.tokens > 1 and self.last_at > self.first_at:
            parts.append(f"{(self.tokens - 1) / (self.last_at - self.first_at):.1f} tokens/s")
        if prompt := self.usage.get("prompt_tokens"):
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            parts.append(f"{prompt} prompt tokens" + (f", {cached} cached" if cached else ""))
        if self.finish == "length":
            parts.append("cut at the longest length")
        return " · ".join(parts)

    def as_message(self) -> dict[str, Any]:
        """The assistant's message for the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [call.as_message() for _, call in sorted(self.calls.items())]
        return message
