"""A streaming JSON value: passed on at once, and repaired where its meaning is certain."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

# Whitespace of JSON in grammars: as `json.dumps` writes it, or without spaces. More is useless, and a weak model would write
# whitespace until its tokens are used up.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
MAX_DEPTH = 200
MAX_WORD = 1_000
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?\Z")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_WORD_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-._$")
_SPACE = frozenset(" \t\r\n")
_PLAIN_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


def escaped(text: str) -> str:
    """Text escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonText:
    """One value.

    Raw line breaks in strings, wrong escapes, trailing commas, Python's words, single quotes and bare keys are repaired. What
    else isn't JSON goes out as it is, so that the client's parser refuses it: a guess could do harm. `quote` delimits
    strings as well, without escapes in them.
    """

    def __init__(self, quote: str = "") -> None:
        self.done = False
        self.broken = False
        self._quote = quote
        self._mode: Callable[[str], bool] = self._value
        self._open: list[str] = []
        self._closer = '"'
        self._in_key = False
        self._held = ""
        self._comma = ""  # with the whitespace after it: it may be a trailing comma
        self._is_empty = False  # the container was just opened
        self._out: list[str] = []

    @property
    def in_string(self) -> bool:
        return self._mode in (self._string, self._escape, self._hex, self._quoted)

    def push(self, text: str) -> tuple[str, int]:
        """Take text; return the output, and the number of characters that belong to the value."""
        self._out = []
        used = 0
        while used < len(text) and not self.done:
            if self._mode(text[used]):
                used += 1
        return "".join(self._out), used

    def finish(self, *, is_whole: bool) -> str:
        """Finish. A value that its writer ended only lacks brackets; a truncated one stays truncated."""
        self._out = []
        if self._mode == self._word:
            self._end_word()
        elif not is_whole:
            self._out.append(self._held)
        self._held = ""
        between = self._mode in (self._key, self._value) and (self._is_empty or bool(self._comma))
        if is_whole and not self.broken and (between or self._mode == self._after):
            self._out += reversed(self._open)
            self.done = True
        return "".join(self._out)

    # -- one character each; False: it belongs to what follows ----------------------------------------------------

    def _value(self, char: str) -> bool:
        if char in _SPACE:
            return self._spaced(char)
        if self._held or (self._quote and char == self._quote[0]):
            return self._opening_quote(char)
        if char in "\"'":
            return self._open_string(char)
        if char in "{[":
            return self._open_container(char)
        if char == "]" and self._open[-1:] == ["]"]:
            return self._close(char)
        if char in _WORD_CHARS:
            self._held, self._mode = char, self._word
            return True
        return self._break(char)

    def _key(self, char: str) -> bool:
        if char in _SPACE:
            return self._spaced(char)
        self._in_key = True
        if self._held or (self._quote and char == self._quote[0]):
            return self._opening_quote(char)
        if char in "\"'":
            return self._open_string(char)
        self._in_key = False
        if char == "}":
            return self._close(char)
        if char in _WORD_CHARS:
            self._held, self._mode = char, self._bare_key
            return True
        return self._break(char)

    def _bare_key(self, char: str) -> bool:
        if char in _WORD_CHARS and len(self._held) < MAX_WORD:
            self._held += char
            return True
        self._emit(json.dumps(self._held))
        self._held, self._mode = "", self._colon
        return False

    def _colon(self, char: str) -> bool:
        if char in _SPACE:
            return self._spaced(char)
        if char != ":":
            return self._break(char)
        self._emit(char)
        self._mode, self._is_empty = self._value, False
        return True

    def _after(self, char: str) -> bool:
        if char in _SPACE:
            return self._spaced(char)
        if char == ",":
            self._comma, self._is_empty = char, False
            self._mode = self._key if self._open[-1] == "}" else self._value
            return True
        return self._close(char) if char == self._open[-1] else self._break(char)

    def _word(self, char: str) -> bool:
        if char in _WORD_CHARS and len(self._held) < MAX_WORD:
            self._held += char
            return True
        self._end_word()
        return False

    def _string(self, char: str) -> bool:
        if char == self._closer:
            self._out.append('"')
            return self._end_string()
        if char == "\\":
            self._mode = self._escape
        else:
            self._out.append(char if char >= " " and char != '"' else escaped(char))
        return True

    def _escape(self, char: str) -> bool:
        self._mode = self._string
        if char == "u":
            self._held, self._mode = "", self._hex
        elif char in _PLAIN_ESCAPES:
            self._out.append("\\" + char)
        elif char == "'":
            self._out.append(char)
        else:
            self._out.append("\\\\" + escaped(char))
        return True

    def _hex(self, char: str) -> bool:
        is_digit = char in _HEX
        self._held += char if is_digit else ""
        if is_digit and len(self._held) < 4:
            return True
        self._out.append(("\\u" if is_digit else "\\\\u") + self._held)
        self._held, self._mode = "", self._string
        return is_digit

    def _quoted(self, char: str) -> bool:
        """The content of `quote`, possibly in part."""
        self._held += char
        while self._held and not self._quote.startswith(self._held):
            self._out.append(escaped(self._held[0]))
            self._held = self._held[1:]
        if self._held == self._quote:
            self._held = ""
            self._out.append('"')
            return self._end_string()
        return True

    def _raw(self, char: str) -> bool:
        self._out.append(char)
        return True

    # -- parts of them ------------------------------------------------------------------------------------------------

    def _spaced(self, char: str) -> bool:
        if self._comma:
            self._comma += char
        elif self._open:
            self._out.append(char)
        return True

    def _emit(self, text: str) -> None:
        self._out.append(self._comma + text)
        self._comma = ""

    def _opening_quote(self, char: str) -> bool:
        self._held += char
        if not self._quote.startswith(self._held):
            return self._break("")
        if self._held == self._quote:
            self._held = ""
            self._emit('"')
            self._mode = self._quoted
        return True

    def _open_string(self, char: str) -> bool:
        self._closer = char
        self._emit('"')
        self._mode = self._string
        return True

    def _end_string(self) -> bool:
        if self._in_key:
            self._in_key, self._mode = False, self._colon
        else:
            self._end_value()
        return True

    def _open_container(self, char: str) -> bool:
        if len(self._open) >= MAX_DEPTH:
            return self._break(char)
        self._emit(char)
        self._open.append("}" if char == "{" else "]")
        self._mode, self._is_empty = (self._key if char == "{" else self._value), True
        return True

    def _close(self, char: str) -> bool:
        self._comma = ""  # a trailing one
        self._out.append(char)
        self._open.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._is_empty = False
        self.done = not self._open
        self._mode = self._after

    def _end_word(self) -> None:
        word, self._held = self._held, ""
        known = _WORDS.get(word)
        if known is None and not _NUMBER.match(word):
            self._break(word)
        else:
            self._emit(known or word)
            self._end_value()

    def _break(self, text: str) -> bool:
        self.broken, self._mode = True, self._raw
        self._emit(self._held + text)
        self._held = ""
        return True
