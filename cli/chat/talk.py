"""A conversation and the settings of its next answer; `/save` writes it to a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.chat.turn import Turn
from common.settings import ConfigError

OPTIONS: dict[str, type] = {  # request fields that `/set` takes
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "stop": str,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "reasoning_effort": str,
}


@dataclass(slots=True)
class Switches:
    """The terminal's own choices, which change no request."""

    shows_pace: bool = True
    draws_markdown: bool = True
    keeps_history: bool = True


@dataclass(slots=True)
class Talk:
    """A conversation, and the settings of its next answers."""

    model: str
    models: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)  # without the system message
    tools: list[Any] = field(default_factory=list)
    think: bool | None = None  # None: the template's default
    switches: Switches = field(default_factory=Switches)
    last: Turn = field(default_factory=Turn)
    turns: int = 0
    tokens: int = 0  # summed over all answers

    def body(self) -> dict[str, Any]:
        """The body of the next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": self.model, "messages": [*system, *self.messages], "stream": True}
        body |= {"stream_options": {"include_usage": True}} | self.options
        if self.tools:
            body["tools"] = self.tools
        if self.think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.think}
        return body

    def heard(self, turn: Turn) -> None:
        """Add an answer, complete or stopped, to the conversation; one that failed before its first token is dropped."""
        self.last = turn
        self.turns += 1
        self.tokens += turn.tokens
        if turn.text or turn.calls or (turn.finish and not turn.error):
            self.messages.append(turn.as_message())
        else:
            self.take_back()

    def take_back(self) -> None:
        """Drop the unanswered tail: a question, and calls after it."""
        while self.messages and (self.messages[-1]["role"] != "assistant" or self.messages[-1].get("tool_calls")):
            self.messages.pop()

    def ask_again(self) -> bool:
        """Drop the last answer, so that its question is last; return False if there was none."""
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if asked:
            del self.messages[asked[-1] + 1 :]
        return bool(asked)

    def option(self, name: str, text: str) -> None:
        """Set an option, or with "default" leave it to the server. Raises ConfigError."""
        if name not in OPTIONS:
            raise ConfigError(f"no option {name!r}: {', '.join(OPTIONS)}")
        if text == "default":
            self.options.pop(name, None)
            return
        try:
            self.options[name] = OPTIONS[name](text)
        except ValueError:
            raise ConfigError(f"{name}: a number is needed, not {text!r}") from None

    def save(self, path: str) -> None:
        """Raises ConfigError."""
        kept = {"model": self.model, "system": self.system, "options": self.options, "messages": self.messages}
        try:
            Path(path).write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None

    def load(self, path: str) -> None:
        """Load a `/save` file, keeping the present model. Raises ConfigError."""
        try:
            kept = json.loads(Path(path).read_text(encoding="utf-8"))
            messages, options, system = kept["messages"], kept.get("options") or {}, kept.get("system") or ""
            is_whole = isinstance(messages, list) and all(isinstance(one["role"], str) for one in messages)
            if not is_whole or not isinstance(system, str) or not options.keys() <= OPTIONS.keys():
                raise ValueError
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{path}: not a conversation saved by /save") from None
        self.messages, self.options, self.system = messages, options, system


def read_tools(path: str) -> list[Any]:
    """Read function definitions from a file. Raises ConfigError."""
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tools: {path}: {error}") from None
    if not isinstance(tools, list):
        raise ConfigError(f"tools: {path}: a list of tools is needed, as in OpenAI's `tools`")
    return tools
