"""Shading: marks the characters of a rendered prompt that a client wrote, since only the template may write control tokens.

Before it renders, every string of a client is *shaded*: the characters that begin or end a control token become lone surrogates,
one for one. No client can send those, and they survive what templates do with text. Where a template reads text (`in`, `split`,
`tojson`) it is shown the plain characters. Afterwards what looks like a control token is the template's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

MAX_MARKED = 2_000  # distinct characters of control tokens; surrogates are 2,048
SLICE_CHARS = 65_536
END = "\udfff"  # ends a text that a template continues; no shaded character
_BETWEEN = "\udffe"
_SURROGATE = re.compile("[\ud800-\udfff]")
# Methods of text that compare it with their arguments.
_READ = frozenset({"count", "endswith", "find", "index", "rfind", "rindex", "startswith"})
_CUT = frozenset({"lstrip", "partition", "removeprefix", "removesuffix", "replace", "rpartition", "rsplit", "rstrip",
                  "split", "splitlines", "strip"})  # fmt: skip
READERS = _READ | _CUT


class Shade:
    """Shades text against `literals`, the texts of a model's control tokens. Immutable."""

    def __init__(self, literals: Iterable[str] = ()) -> None:
        self._literals = frozenset(filter(None, literals))
        self._lengths = sorted({len(literal) for literal in self._literals}, reverse=True)
        edges = sorted({literal[end] for literal in self._literals for end in (0, -1)})
        inner = sorted({character for literal in self._literals for character in literal} - set(edges))
        if len(edges) + len(inner) > MAX_MARKED:
            raise ValueError(f"the control tokens have more than {MAX_MARKED} different characters")
        self._marks = {character: chr(0xD800 + index) for index, character in enumerate([*edges, *inner])}
        self._edges = edges
        self._joined = _BETWEEN.join(self._literals)
        firsts = {re.escape(literal[0]) for literal in self._literals}
        self._first = re.compile(f"[{''.join(sorted(firsts))}]" if firsts else r"(?!)")

    @property
    def literals(self) -> list[str]:
        return sorted(self._literals)

    def text(self, text: str) -> str:
        """Shade a client's string."""
        return self._whole_infix(_in_slices(self._slice_shaded, text))

    def _slice_shaded(self, text: str) -> str:
        return self._edged(_without_surrogates(text), self._edges)

    def all(self, value: Any, write: Callable[[Any], str] = repr) -> Any:
        """Shade every string in a client's JSON value. `write` serialises an object."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return _Object({name: self.all(part) for name, part in value.items()}, self, write)
        if isinstance(value, list | tuple):
            return _Array(map(self.all, value), self)
        return value

    def plain(self, text: str) -> str:
        """Unshade characters, one for one."""
        return text if text.isascii() else _in_slices(self._slice_plain, text)

    def _slice_plain(self, text: str) -> str:
        for character in self._edges:
            text = str.replace(text, self._marks[character], character)  # a Markup's own method would escape
        if _SURROGATE.search(text):
            for character, mark in self._marks.items():
                text = str.replace(text, mark, character)
        return text

    def all_plain(self, value: Any) -> Any:
        """A value as the client sent it."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, Mapping):
            return {self.all_plain(name): self.all_plain(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.all_plain, value)) if type(value) is tuple else [*map(self.all_plain, value)]
        return value

    def comparable(self, value: Any) -> Any:
        """A comparison's operand as a template should see it."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, Mapping):
            return {self.comparable(name): part for name, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.comparable, value)) if type(value) is tuple else [*map(self.comparable, value)]
        return value

    def written(self, write: Callable[[Any], str], value: Any) -> str:
        """The text that `write` makes of a value, such as its JSON."""
        known = self.all_plain(value)
        text = write(known)
        return text if _same(known, value) else self._edged(text, self._edges)

    def read(self, text: str, method: str, arguments: Sequence[Any], names: Mapping[str, Any]) -> Any:
        """Call one of `READERS` on the plain text; pieces stay shaded."""
        plain = self.plain(text)
        if method == "replace":
            return self._replaced(text, plain, *arguments, **names)
        found = getattr(plain, method)(*map(self.comparable, arguments), **names)
        if method in _READ or plain == text:
            return found
        if method == "removeprefix":
            return text[len(plain) - len(found) :]
        if isinstance(found, str):
            start = plain.find(found)
            return text[start : start + len(found)]
        separator = arguments[0] if arguments else names.get("sep")
        between = len(separator) if method in ("split", "rsplit") and isinstance(separator, str) else 0
        return type(found)(_pieces(text, plain, found, between))

    def controls(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of each control token in a rendered text that no client wrote."""
        end = 0
        for found in self._first.finditer(text):
            start = found.start()
            if start < end:
                continue
            length = next((n for n in self._lengths if text[start : start + n] in self._literals), 0)
            if length:
                end = start + length
                yield start, end

    def _edged(self, text: str, edges: Sequence[str]) -> str:
        for character in edges:
            if character in text:
                text = text.replace(character, self._marks[character])
        return text

    def _whole_infix(self, text: str) -> str:
        """Shade a possible middle of a control token: a name `think` between a template's `<` and `>`."""
        solid = text.strip()
        if not solid or len(solid) > self._longest or solid not in self._joined:
            return text
        start = text.index(solid)
        return f"{text[:start]}{self._marks[solid[0]]}{text[start + 1 :]}"

    @property
    def _longest(self) -> int:
        return self._lengths[0] if self._lengths else 0

    def _replaced(self, text: str, plain: str, old: str, new: str, count: int = -1) -> str:
        old = self.plain(old)
        if not old or plain == text:
            return text.replace(old, new, count)
        return new.join(_pieces(text, plain, plain.split(old, count), len(old)))


class _Object(dict[str, Any]):
    """A client's object, rendered like the plain one. Its keys are plain for lookups, and shaded when shown."""

    __slots__ = ("_shade", "_write")

    def __init__(self, pairs: Mapping[str, Any], shade: Shade, write: Callable[[Any], str]) -> None:
        super().__init__(pairs)
        self._shade = shade
        self._write = write

    def __repr__(self) -> str:
        return self._shade.written(self._write, self)

    def __radd__(self, text: str) -> str:
        return text + str(self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __iter__(self) -> Iterator[str]:
        return map(self._shade.text, super().__iter__())

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._plain(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._plain(name))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(self._plain(name), default)

    def keys(self) -> Any:
        return [*self]

    def items(self) -> Any:
        return [*zip(self, self.values(), strict=True)]

    def _plain(self, name: Any) -> Any:
        return self._shade.plain(name) if isinstance(name, str) else name


class _Array(list[Any]):
    """A client's array."""

    __slots__ = ("_shade",)

    def __init__(self, entries: Iterable[Any], shade: Shade) -> None:
        super().__init__(entries)
        self._shade = shade

    def __repr__(self) -> str:
        return self._shade.written(repr, self)


def _in_slices(change: Callable[[str], str], text: str) -> str:
    """Change each character by itself, in slices, so that other threads run in between."""
    if len(text) <= SLICE_CHARS:
        return change(text)
    return "".join([change(text[start : start + SLICE_CHARS]) for start in range(0, len(text), SLICE_CHARS)])


def _without_surrogates(text: str) -> str:
    """JSON within JSON without surrogates."""
    return text if text.isascii() or not _SURROGATE.search(text) else _SURROGATE.sub("\ufffd", text)


def _pieces(text: str, plain: str, found: Sequence[str], between: int) -> Iterator[str]:
    """`found` are pieces of `plain` in order, so many characters apart; yield the same pieces of `text`, which is as long."""
    at = 0
    for piece in found:
        at = plain.index(piece, at)
        yield text[at : at + len(piece)]
        at += len(piece) + between


def _same(plain: Any, value: Any) -> bool:
    """True if nothing in a value was shaded."""
    if isinstance(value, _Object | _Array):
        return False
    return bool(plain == value)
