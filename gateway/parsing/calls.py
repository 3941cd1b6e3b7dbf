"""Streaming readers of calls written as JSON objects or in Python's notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from typing import Protocol

from gateway.parsing.json_text import JsonText
from gateway.parsing.values import ObjectText, python_json

ARGUMENT_KEYS = ("arguments", "parameters")
_KNOWN_KEYS = (*ARGUMENT_KEYS, "id", "type", "function")
_SPACE = frozenset(" \t\r\n")
MAX_NAME_CHARS = 256


class CallSink(Protocol):
    """The receiver of calls."""

    def begin(self, name: str, id: str = "") -> None: ...
    def arguments(self, text: str) -> None: ...
    def end(self) -> None: ...


class JsonCalls:
    """`{"name": …, "arguments": {…}}`, once, in a list, or several with `;` between them.

    `failed` says that it is no call; that can't be once one has begun. With `names` other functions are no calls either.
    `name_key` is the key that the name stands under; "": `{"f": {…}}` calls f as well.
    """

    def __init__(
        self, sink: CallSink, names: Container[str] | None, quote: str = "", *, name_key: str = "name"
    ) -> None:
        self.failed = False
        self.began = False
        self.done = False
        self._sink = sink
        self._names = names
        self._quote = quote
        self._name_key = name_key or "name"
        self._key_is_name = not name_key
        self._mode: Callable[[str], bool] = self._start
        self._depth = 0
        self._value: JsonText | None = None
        self._key = ""
        self._collected = ""
        self._name = self._id = self._early = ""
        self._has_arguments = False

    @property
    def in_string(self) -> bool:
        return self._value is not None and self._value.in_string

    def push(self, text: str) -> int:
        """Take text; return the number of characters that belong to the calls."""
        used = 0
        while used < len(text) and not (self.failed or self.done):
            if self._value is not None:
                used += self._in_value(text[used:])
            elif self._mode(text[used]):
                used += 1
        return used

    def finish(self, *, is_whole: bool) -> None:
        if self._value is not None and self._mode == self._next:
            self._took(self._value.finish(is_whole=is_whole))
        if self._name and is_whole:
            self._end_call()

    def _start(self, char: str) -> bool:
        if char == "{":
            return self._open()
        if char not in _SPACE and char not in "[],;":
            if self.began:
                self.done = True
                return False
            self.failed = True
        elif char == "[" and self.began:
            self.done = True
            return False
        return True

    def _open(self) -> bool:
        self._depth += 1
        self._mode = self._in_object
        return True

    def _in_object(self, char: str) -> bool:
        if char == "}":
            self._depth -= 1
            self._mode = self._next
            if self._depth == 0:
                self._end_call()
                self._mode = self._start
            return True
        if char in "\"'":
            self._key, self._collected, self._value = "", "", JsonText()
            self._mode = self._colon
            return False
        if char not in _SPACE and char != ",":
            self._fail()
        return True

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._key = _text_of(self._collected)
            self._collected = ""
            self._mode = self._opening
            if self._key != self._name_key and self._key not in _KNOWN_KEYS:
                self._other_key()
        elif char not in _SPACE:
            self._fail()
        return True

    def _other_key(self) -> None:
        """Handle a key that is not part of a call, unless it is the name itself."""
        if self._key_is_name:
            if self._name:
                self._end_call()
            self._called(self._key)
            self._key = ARGUMENT_KEYS[0]
        elif self._names is not None and not self.began:
            self.failed = True

    def _opening(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if self._key == "function" and char == "{":
            return self._open()
        self._value = JsonText(self._quote)
        self._mode = self._next
        return False

    def _next(self, char: str) -> bool:
        if char in ",}":
            self._mode = self._in_object
            return char == ","
        if char not in _SPACE:
            self._fail()
        return True

    def _in_value(self, text: str) -> int:
        value = self._value
        assert value is not None
        out, used = value.push(text)
        self._took(out)
        if value.done:
            self._value = None
            if self._mode == self._next:
                self._took_all()
        return used

    def _took(self, out: str) -> None:
        is_arguments = self._mode == self._next and self._key in ARGUMENT_KEYS
        if not is_arguments or self._collected.startswith('"') or (not self._collected and out.startswith('"')):
            self._collected += out  # arguments may also be a JSON string
            if len(self._collected) > MAX_NAME_CHARS and not is_arguments and self._mode == self._colon:
                self._fail()
            return
        self._collected = self._collected or out[:1]
        self._pass(out)

    def _took_all(self) -> None:
        text, self._collected = self._collected, ""
        if self._key == self._name_key or (self._key == "function" and text.startswith('"')):
            self._called(_text_of(text))
        elif self._key == "id":
            self._id = _text_of(text)
        elif self._key in ARGUMENT_KEYS and text.startswith('"'):
            self._pass(_text_of(text) or "{}")

    def _called(self, name: str) -> None:
        if not name or (self._names is not None and not self.began and name not in self._names):
            self._fail()
            return
        self.began = True
        self._name = name
        self._sink.begin(name, self._id)
        early, self._early = self._early, ""
        if early:
            self._pass(early)

    def _pass(self, text: str) -> None:
        if not self._name:
            self._early += text
            return
        self._has_arguments = self._has_arguments or bool(text)
        self._sink.arguments(text)

    def _end_call(self) -> None:
        if self._name:
            if not self._has_arguments:
                self._sink.arguments("{}")
            self._sink.end()
        elif not self.began:
            self.failed = True
        self._name = self._id = self._early = ""
        self._has_arguments = False

    def _fail(self) -> None:
        """Stop: this is no call, or no longer one."""
        self._value = None
        if self.began:
            self.done = True
        else:
            self.failed = True


def _text_of(text: str) -> str:
    """A JSON string's text; "" for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""


class PythonCalls:
    """`f(a=1, b="x")`, several in brackets or on separate lines. Each argument is sent as a whole."""

    def __init__(self, sink: CallSink, names: Container[str] | None) -> None:
        self.failed = False
        self.began = False
        self.done = False
        self._sink = sink
        self._names = names
        self._name = ""
        self._written: ObjectText | None = None
        self._text = ""
        self._open: list[str] = []
        self._quote = ""
        self._is_escaped = False

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    def push(self, text: str) -> int:
        for used, char in enumerate(text):
            if self.failed or self.done:
                return used
            if self._written is None:
                self._before_call(char)
            elif self._quote:
                self._in_quotes(char)
            else:
                self._in_call(char)
        return len(text)

    def finish(self, *, is_whole: bool) -> None:
        if not self.began:
            self.failed = True

    def _before_call(self, char: str) -> None:
        if char.isalnum() or char in "_.-":
            self._name += char
            if len(self._name) > MAX_NAME_CHARS:
                self._fail()
        elif char == "(":
            if not self._name or (self._names is not None and not self.began and self._name not in self._names):
                self._fail()
                return
            self.began = True
            self._sink.begin(self._name)
            self._name, self._text, self._written = "", "", ObjectText()
        elif self._name or (char not in _SPACE and char not in "[],;"):
            self._fail()

    def _in_quotes(self, char: str) -> None:
        self._text += char
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif self._text.endswith(self._quote):
            self._quote = ""

    def _in_call(self, char: str) -> None:
        if not self._open and char in ",)":
            self._argument()
            if char == ")":
                self._end()
            return
        self._text += char
        if char in "\"'":
            self._quote = char
        elif char in "([{":
            self._open.append(char)
        elif char in ")]}" and self._open:
            self._open.pop()

    def _argument(self) -> None:
        text, self._text = self._text, ""
        key, equals, value = text.partition("=")
        if self._written is not None and equals and key.strip():
            found = python_json(value)
            said = json.dumps(value.strip(), ensure_ascii=False) if found is None else found
            self._sink.arguments(self._written.key(key.strip()) + said)

    def _end(self) -> None:
        if self._written is not None:
            self._sink.arguments(self._written.close())
        self._sink.end()
        self._written = None

    def _fail(self) -> None:
        if self.began:
            self.done = True
        else:
            self.failed = True
