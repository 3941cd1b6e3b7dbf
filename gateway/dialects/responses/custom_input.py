"""The input of a custom tool: text that the model writes as a call's only argument."""

from __future__ import annotations

import json
import re

INPUT = "input"
_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
MAX_HEAD_CHARS = 64
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


class CustomInput:
    """A streaming parser of `{"input": "…"}` that yields the text in it. Other arguments are returned unchanged at the end."""

    def __init__(self) -> None:
        self._buffer = ""
        self._is_text = False  # the head was parsed
        self._is_over = False
        self._is_other = False

    def add(self, arguments: str) -> str:
        """Return the new part of the text."""
        self._buffer += arguments
        if not self._is_text and not self._is_other:
            head = _HEAD.match(self._buffer)
            if head is None:
                self._is_other = len(self._buffer) > MAX_HEAD_CHARS
                return ""
            self._is_text, self._buffer = True, self._buffer[head.end() :]
        return self._text() if self._is_text and not self._is_over else ""

    def rest(self) -> str:
        """The arguments if they have another form; "" if the text was returned."""
        return "" if self._is_text else self._buffer

    def _text(self) -> str:
        """The text up to its end, or to an incomplete escape."""
        said, at, buffer = list[str](), 0, self._buffer
        while at < len(buffer):
            plain = _PLAIN.match(buffer, at)
            if plain is not None:
                said.append(plain[0])
                at = plain.end()
            elif buffer[at] == '"':
                self._is_over = True
                break
            else:
                length = _escape_length(buffer, at)
                if length == 0:
                    break
                said.append(_unescaped(buffer[at : at + length]))
                at += length
        self._buffer = buffer[at:]
        return "".join(said)


def _escape_length(text: str, at: int) -> int:
    """Length of the escape at `at`, with the second half of a surrogate pair; 0 while it is incomplete."""
    if len(text) < at + 2:
        return 0
    if text[at + 1] != "u":
        return 2
    if len(text) < at + 6:
        return 0
    if _code(text, at) not in _HIGH:
        return 6
    following = text[at + 6 : at + 12]
    if not "\\u".startswith(following[:2]):
        return 6
    if len(following) < 6:
        return 0
    return 12 if _code(text, at + 6) in _LOW else 6


def _code(text: str, at: int) -> int:
    try:
        return int(text[at + 2 : at + 6], 16)
    except ValueError:
        return 0


def _unescaped(escape: str) -> str:
    if escape[1] != "u":
        return _ESCAPES.get(escape[1], escape[1])
    try:
        return json.loads(f'"{escape}"').encode("utf-8", "replace").decode()
    except ValueError:
        return escape


def as_arguments(text: str) -> dict[str, str]:
    """The arguments of a call with this input."""
    return {INPUT: text}
