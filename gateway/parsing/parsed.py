"""The results of a parser: pieces of a message."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.parsing.format import CallIds

# A model may write the escape of a lone surrogate, which no encoder accepts.
_SURROGATES = re.compile("[\ud800-\udfff]")
_LETTERS = string.ascii_letters + string.digits
_SMALL_LETTERS = string.ascii_lowercase + string.digits


@dataclass(slots=True, kw_only=True)
class CallDelta:
    """A piece of one call: first its id and name, then its arguments' JSON in parts."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True, kw_only=True)
class Parsed:
    """The additions of some tokens to a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def add(self, other: Parsed) -> None:
        """Append another piece."""
        self.content += other.content
        self.reasoning += other.reasoning
        join_calls(self.calls, other.calls)


def join_calls(calls: list[CallDelta], further: Iterable[CallDelta]) -> None:
    """Append pieces of calls to others: pieces of the same call are merged."""
    for delta in further:
        if calls and calls[-1].index == delta.index and not delta.name:
            calls[-1].arguments += delta.arguments
        else:
            calls.append(delta)


def new_call_id(kind: CallIds, name: str, index: int) -> str:
    if kind == CallIds.KIMI:
        return f"functions.{name}:{index}"
    if kind == CallIds.MISTRAL:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    if kind == CallIds.SOLAR:
        return "".join(secrets.choice(_SMALL_LETTERS) for _ in range(10))
    return f"call_{secrets.token_hex(12)}"


def _encodable(text: str) -> str:
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text)


class CallWriter:
    """Numbers calls and collects their pieces. Calls beyond `max_calls` are dropped."""

    def __init__(self, ids: CallIds, max_calls: int) -> None:
        self.count = 0
        self.name = ""
        self.is_open = False
        self.has_arguments = False
        self._ids = ids
        self._max_calls = max_calls
        self._known: set[str] = set()
        self._pieces: list[CallDelta] = []

    def begin(self, name: str, id: str = "") -> None:
        self.end()
        name, id = _encodable(name), _encodable(id)
        self.name, self.is_open, self.has_arguments = name, True, False
        index = self.count
        self.count += 1
        if index < self._max_calls:
            if not id or id in self._known:
                id = new_call_id(self._ids, name, index)
            self._known.add(id)
            self._pieces.append(CallDelta(index=index, id=id, name=name))

    def arguments(self, text: str) -> None:
        if not text or not self.is_open:
            return
        self.has_arguments = True
        text = _encodable(text)
        if self.count > self._max_calls:
            return
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.index == self.count - 1:
            last.arguments += text
        else:
            self._pieces.append(CallDelta(index=self.count - 1, arguments=text))

    def end(self) -> None:
        if self.is_open and not self.has_arguments:
            self.arguments("{}")
        self.is_open = False

    def resume(self) -> None:
        """Start a new message: a call that is still open becomes its first."""
        self._pieces, self.count = [], 0
        if self.is_open:
            self.is_open, had_arguments = False, self.has_arguments
            self.begin(self.name)
            self.has_arguments = had_arguments

    def take(self) -> list[CallDelta]:
        pieces, self._pieces = self._pieces, []
        return pieces
