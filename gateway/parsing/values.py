"""Conversion of arguments in plain text or Python to JSON, by the tool's schema."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gateway.parsing.json_text import escaped

Schema = Mapping[str, Any]
MAX_PYTHON_CHARS = 200_000
MAX_LOOKED = 256
MAX_REFERENCE_CHARS = 1_000
_BRANCHES = ("anyOf", "oneOf", "allOf")


def schema_of(parameters: Schema, key: str) -> Schema:
    """The schema of one argument; empty without one."""
    properties = parameters.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types_of(schema: Schema, root: Schema) -> frozenset[str]:
    """The JSON types allowed for an argument, found in the first MAX_LOOKED parts of its schema; empty: anything."""
    found: set[str] = set()
    seen: set[int] = set()
    to_see, left = [schema], MAX_LOOKED
    while to_see and left > 0:
        one = to_see.pop()
        left -= 1
        if id(one) in seen:
            continue
        seen.add(id(one))
        reference = one.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            to_see.append(_resolved(reference, root))
            continue
        kind = one.get("type")
        listed = [kind] if isinstance(kind, str) else _listed(kind, left)
        options = _listed(one.get("enum"), left - len(listed))
        left -= len(listed) + len(options)
        kinds = {each for each in listed if isinstance(each, str)}
        kinds = kinds or {_TYPE_NAMES.get(type(option), "object") for option in options}
        found |= kinds
        if not kinds:
            for name in _BRANCHES:
                branches = _listed(one.get(name), left - len(to_see))
                to_see += [branch for branch in branches if isinstance(branch, Mapping)]
    return frozenset(found)


def _listed(value: Any, most: int) -> list[Any]:
    """The start of a list; a client may have put anything there."""
    return value[: max(0, most)] if isinstance(value, list) else []


_TYPE_NAMES: dict[type, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array",
}  # fmt: skip


def _resolved(reference: str, root: Schema) -> Schema:
    if len(reference) > MAX_REFERENCE_CHARS:
        return {}
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_text(types: frozenset[str]) -> bool:
    """True if an argument is text, whatever it looks like; so it is without a schema."""
    return not types or types == {"string"}


def converted(text: str, types: frozenset[str]) -> str:
    """Plain text as JSON of the first type that fits; else a string."""
    word = text.strip()
    for kind in ("null", "boolean", "integer", "number", "array", "object"):
        if kind in types:
            found = _READERS[kind](word)
            if found is not None:
                return found
    return json.dumps(text, ensure_ascii=False)


def _read_number(word: str) -> str | None:
    try:
        number = float(word)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 and "." not in word else repr(number)


def _read_integer(word: str) -> str | None:
    digits = word.removeprefix("-").removeprefix("+")
    return str(int(word)) if digits.isascii() and digits.isdigit() and len(digits) < 1_000 else None


def _read_container(word: str, kind: type) -> str | None:
    try:
        found = json.loads(word)
    except (ValueError, RecursionError):
        text = python_json(word)
        found = json.loads(text) if text is not None else None
    return json.dumps(found, ensure_ascii=False) if isinstance(found, kind) else None


_READERS: dict[str, Callable[[str], str | None]] = {
    "null": lambda word: "null" if word in ("null", "None", "nil") else None,
    "boolean": lambda word: word.lower() if word.lower() in ("true", "false") else None,
    "integer": _read_integer,
    "number": _read_number,
    "array": lambda word: _read_container(word, list),
    "object": lambda word: _read_container(word, dict),
}


def python_json(text: str) -> str | None:
    """A Python literal as JSON; None if it is none."""
    if len(text) > MAX_PYTHON_CHARS:
        return None
    try:
        return json.dumps(_literal(ast.parse(text.strip(), mode="eval").body), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_literal(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key}
        case _:
            raise ValueError("not a literal")


class ObjectText:
    """A writer of an object, argument by argument: the methods' results, joined, are its JSON."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def is_open(self) -> bool:
        return self._count > 0

    def key(self, name: str) -> str:
        self._count += 1
        return f"{', ' if self._count > 1 else '{'}{json.dumps(name, ensure_ascii=False)}: "

    def close(self) -> str:
        return "}" if self._count else "{}"


class PlainValue:
    """An argument in plain text, without the line breaks of its markup."""

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._streams = is_text(types)
        self._text = ""  # all of it, or the tail that may be markup
        self._began = False

    def push(self, text: str) -> Iterator[str]:
        if not self._streams:
            self._text += text
            return
        text = self._text + text
        if not self._began:
            if text in ("", "\r"):
                self._text = text
                return
            self._began = True
            yield '"'
            text = text.removeprefix("\r").removeprefix("\n") if text[:2] == "\r\n" else text.removeprefix("\n")
        kept = 2 if text.endswith("\r\n") else 1 if text.endswith(("\n", "\r")) else 0
        self._text = text[len(text) - kept :]
        if kept < len(text):
            yield escaped(text[: len(text) - kept])

    def finish(self, *, is_whole: bool) -> str:
        """End the value; a truncated one isn't closed."""
        if not self._streams:
            return converted(_unframed(self._text), self._types) if is_whole else ""
        opening = "" if self._began else '"'
        rest = "" if self._text in ("\n", "\r\n") else escaped(self._text)
        return opening + rest + ('"' if is_whole else "")


def _unframed(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")
