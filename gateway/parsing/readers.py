"""Readers of a state's text, one class a meaning. A reader lives from entering a state to leaving it."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, Protocol

from gateway.parsing.body import calls_of
from gateway.parsing.calls import JsonCalls, PythonCalls
from gateway.parsing.format import Means, State
from gateway.parsing.json_text import JsonText
from gateway.parsing.parsed import CallWriter, Parsed
from gateway.parsing.terminals import Patience
from gateway.parsing.values import ObjectText, PlainValue, Schema, schema_of, types_of

MAX_HEADER_CHARS = 1_000
MAX_BODY_CHARS = 1_000_000


class Message:
    """The readers' output, and the facts of the answer so far."""

    def __init__(
        self, writer: CallWriter, schemas: Mapping[str, Schema], names: Container[str], patience: Patience
    ) -> None:
        self.calls = writer
        self.patience = patience  # time limit of the model's own patterns
        self.schemas = schemas
        self.names = names
        self.new = Parsed()
        self.has_content = False  # more than whitespace was output
        self.trims = False  # the next whitespace belongs to markup
        self.gap = ""  # whitespace before the markup
        self.key = ""
        self._written = ObjectText()

    def call(self, name: str, id: str = "") -> None:
        self.calls.begin(name, id)
        self._written = ObjectText()

    def end_call(self) -> None:
        """End the call; arguments that were written one by one are closed."""
        if self.calls.is_open and self._written.is_open:
            self.calls.arguments(self._written.close())
        self._written = ObjectText()
        self.calls.end()

    def open_argument(self) -> frozenset[str]:
        """Write the key of the next argument; return its types, as far as the tool's schema has them."""
        self.calls.arguments(self._written.key(self.key))
        parameters = self.schemas.get(self.calls.name, {})
        return types_of(schema_of(parameters, self.key), parameters)


class Reader(Protocol):
    """The reader of a state's text."""

    @property
    def in_string(self) -> bool:
        """True if an apparent terminal is only text now."""
        ...

    @property
    def over(self) -> bool:
        """True if the rest belongs to the next state, without a terminal in between."""
        ...

    def push(self, text: str) -> int:
        """Take text; return the number of characters taken, all unless `over`."""
        ...

    def finish(self, *, is_whole: bool) -> str:
        """Leave the state, or end the answer, cut if not `is_whole`. Returns text that is content after all."""
        ...


class TextReader:
    """Content or reasoning. Whitespace next to markup isn't part of it, but separates content from content."""

    in_string = over = False

    def __init__(self, message: Message, means: Means) -> None:
        self._message = message
        self._is_content = means == Means.CONTENT
        self._space: list[str] = []

    def push(self, text: str) -> int:
        message = self._message
        if not text or text.isspace():
            self._space.append(text)
            return len(text)
        whole = "".join([*self._space, text])
        stripped = whole.rstrip()
        self._space = [whole[len(stripped) :]]
        if message.trims:
            said = stripped.lstrip()
            lead = stripped[: len(stripped) - len(said)]
            stripped = (message.gap or lead) + said if self._is_content and message.has_content else said
            message.trims = False
        if self._is_content:
            message.new.content += stripped
            message.has_content = True
        else:
            message.new.reasoning += stripped
        return len(text)

    @property
    def is_clear(self) -> bool:
        """True if all text was output, except for trailing whitespace."""
        message = self._message
        return not (message.trims or any(self._space)) and (message.has_content or not self._is_content)

    @property
    def withheld(self) -> str:
        """Whitespace after content, which following markup may absorb."""
        if not self._is_content or not self._message.has_content or self._message.trims:
            return ""
        self._space = ["".join(self._space)]
        return self._space[0]

    def finish(self, *, is_whole: bool) -> str:
        if self._is_content and self._message.has_content:
            self._message.gap = "".join(self._space)
        return ""

    def close(self) -> None:
        """End the answer: its trailing whitespace is part of it."""
        if self._is_content and not self._message.trims:
            self._message.new.content += "".join(self._space)
            self._space = []


class HeaderReader:
    """The text of a header."""

    in_string = over = False

    def __init__(self) -> None:
        self.text = ""

    def push(self, text: str) -> int:
        self.text = (self.text + text)[:MAX_HEADER_CHARS]
        return len(text)

    def finish(self, *, is_whole: bool) -> str:
        return ""


class ValueReader:
    in_string = over = False

    def __init__(self, message: Message, types: frozenset[str]) -> None:
        self._calls = message.calls
        self._value = PlainValue(message.open_argument() or types)

    def push(self, text: str) -> int:
        for piece in self._value.push(text):
            self._calls.arguments(piece)
        return len(text)

    def finish(self, *, is_whole: bool) -> str:
        self._calls.arguments(self._value.finish(is_whole=is_whole))
        return ""


class JsonReader:
    """A call's arguments."""

    over = False

    def __init__(self, message: Message, quote: str) -> None:
        self._calls = message.calls
        self._json = JsonText(quote)

    @property
    def in_string(self) -> bool:
        return self._json.in_string

    def push(self, text: str) -> int:
        self._calls.arguments(self._json.push(text)[0])
        return len(text)

    def finish(self, *, is_whole: bool) -> str:
        self._calls.arguments(self._json.finish(is_whole=is_whole))
        return ""


class CallsReader:
    """Complete calls. Text that turns out to be no call is returned unchanged."""

    def __init__(self, message: Message, state: State) -> None:
        self._message, self._state = message, state
        self._names = message.names if state.is_guess else None
        self._calls: JsonCalls | PythonCalls = (
            self._json() if state.means == Means.JSON_CALLS else PythonCalls(message.calls, self._names)
        )
        self._is_guess = state.is_guess
        self._raw = ""
        self._may_be_json = state.means == Means.CALLS

    def _json(self) -> JsonCalls:
        return JsonCalls(self._message.calls, self._names, self._state.quote, name_key=self._state.name_key)

    @property
    def in_string(self) -> bool:
        return self._calls.in_string

    @property
    def over(self) -> bool:
        return self._is_guess and (self._calls.failed or self._calls.done)

    def push(self, text: str) -> int:
        used = self._calls.push(text)
        if self._calls.failed and self._may_be_json:
            self._may_be_json = False
            return self._again(text)
        if not self._calls.began:
            self._raw += text[: used if self._is_guess else None]
        return used if self._is_guess else len(text)

    def _again(self, text: str) -> int:
        """Read the text again as JSON, since it is no Python."""
        known, self._raw = self._raw, ""
        self._calls = self._json()
        self._calls.push(known)
        if not self._calls.began:
            self._raw = known
        return self.push(text)

    def resume(self) -> None:
        """Mark the text read so far as the prompt's, which is not output."""
        self._raw = ""

    def finish(self, *, is_whole: bool) -> str:
        self._calls.finish(is_whole=is_whole)
        return "" if self._calls.began else self._raw


class BodyReader:
    """A field of a response template."""

    in_string = over = False

    def __init__(self, message: Message, read: Mapping[str, Any], captures: Mapping[str, str]) -> None:
        self._message = message
        self._read = read
        self._captures = captures
        self._text = ""
        self._num_known = 0  # characters of the prompt

    def resume(self) -> None:
        self._num_known = len(self._text)

    def push(self, text: str) -> int:
        self._text = (self._text + text)[:MAX_BODY_CHARS]
        return len(text)

    def finish(self, *, is_whole: bool) -> str:
        calls = calls_of(self._text, self._read, self._captures, self._message.schemas, self._message.patience)
        for name, arguments in calls:
            self._message.call(name)
            self._message.calls.arguments(arguments)
            self._message.calls.end()
        return "" if calls else self._text[self._num_known :]


def reader_of(state: State, message: Message, captures: Mapping[str, str]) -> Reader:
    match state.means:
        case Means.CONTENT | Means.REASONING:
            return TextReader(message, state.means)
        case Means.VALUE:
            return ValueReader(message, state.types)
        case Means.JSON:
            return JsonReader(message, state.quote)
        case Means.JSON_CALLS | Means.PYTHON_CALLS | Means.CALLS:
            return CallsReader(message, state)
        case Means.BODY:
            return BodyReader(message, state.read, captures)
        case _:
            return HeaderReader()


def captured(pattern: str, text: str) -> Mapping[str, str] | None:
    """The groups of a header; None if it doesn't match."""
    if not pattern:
        return {}
    found = re.search(pattern, text)
    return None if found is None else {key: value for key, value in found.groupdict().items() if value is not None}
