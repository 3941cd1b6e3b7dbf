"""Formats that clients ask for: one function each. They raise ValueError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.parsing.json_text import COMPACT

MAX_OPTIONS = 4_096


class Whitespace(msgspec.Struct, frozen=True, kw_only=True):
    """Between the parts of JSON: a space behind `:` and `,` at most, the client's pattern wherever JSON allows it, or none."""

    pattern: str | None = None
    is_allowed: bool = True

    @property
    def options(self) -> Mapping[str, Any]:
        """The whitespace options of llguidance."""
        if not self.is_allowed:
            return {"whitespace_flexible": False}
        if self.pattern is None:
            return COMPACT
        return {"whitespace_flexible": True, "whitespace_pattern": self.pattern}


AS_DUMPED = Whitespace()


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, tag="json_schema"):
    """JSON by a schema, as an object or its text. Unless `strict`, unenforceable keywords are ignored."""

    schema: Any
    strict: bool = True
    whitespace: Whitespace = AS_DUMPED


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """A match of the whole answer; `^` and `$` around the pattern are redundant."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """One of these texts."""

    options: Sequence[str]


class Ebnf(msgspec.Struct, frozen=True, tag="ebnf"):
    """Lark with a rule `start`, or GBNF (EBNF with `::=`) with a rule `root`."""

    text: str


class StructuralTag(msgspec.Struct, frozen=True, tag="structural_tag"):
    """Texts, schemas and tags, in sequence or as alternatives: see `structure`."""

    format: Any
    whitespace: Whitespace = AS_DUMPED


class Text(msgspec.Struct, frozen=True, tag="text"):
    """llguidance's own."""

    text: str


Form = JsonSchema | Regex | Choice | Ebnf | StructuralTag | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A form, the client's field of it, and where it starts."""

    field: str  # named in errors
    form: Form
    after: Sequence[int] | None = None  # see `Grammar`
    budget: int | None = None


def json_schema(field: str, schema: Any, *, strict: bool = True, whitespace: Whitespace = AS_DUMPED) -> Wanted:
    return Wanted(field=field, form=JsonSchema(schema=schema, strict=strict, whitespace=whitespace))


def json_object(field: str, *, whitespace: Whitespace = AS_DUMPED) -> Wanted:
    return json_schema(field, {"type": "object"}, whitespace=whitespace)


def regex(field: str, pattern: str) -> Wanted:
    return Wanted(field=field, form=Regex(pattern))


def choice(field: str, options: Sequence[str]) -> Wanted:
    if not 0 < len(options) <= MAX_OPTIONS:
        raise ValueError(f"{field}: must have 1 to {MAX_OPTIONS} options")
    return Wanted(field=field, form=Choice(list(options)))


def ebnf(field: str, text: str) -> Wanted:
    return Wanted(field=field, form=Ebnf(text))


def structural_tag(field: str, format: Any, *, whitespace: Whitespace = AS_DUMPED) -> Wanted:
    return Wanted(field=field, form=StructuralTag(format, whitespace))


def of_text(field: str, text: str, *, after: Sequence[int] | None = None, budget: int | None = None) -> Wanted:
    """A Lark grammar or llguidance's JSON, as made from tools. "" with `after` and a budget limits the reasoning only."""
    return Wanted(field=field, form=Text(text), after=after, budget=budget)
