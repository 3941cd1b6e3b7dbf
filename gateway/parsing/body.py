"""Parsing of a field's text by a response template: content parsers, then a transform of their results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import regex

from gateway.parsing.json_text import JsonText, escaped
from gateway.parsing.terminals import Patience
from gateway.parsing.values import Schema, converted, is_text, schema_of, types_of

MAX_DEPTH = 16
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}\Z")


def calls_of(
    text: str,
    read: Mapping[str, Any],
    captures: Mapping[str, str],
    schemas: Mapping[str, Schema],
    patience: Patience,
) -> list[tuple[str, str]]:
    """Names and arguments of the calls in a field's text; none if it is malformed. Raises SlowPatternError."""
    try:
        value = parsed(text, read.get("content", "text"), read.get("content_args") or {}, patience)
        transform = read.get("transform", "{content}")
        if read.get("transform_each"):
            value = [transformed(transform, {**captures, **item}) for item in value]
        else:
            value = transformed(transform, {**captures, "content": value})
        entries = value if isinstance(value, list) else [value]
        return [_call(entry.get("function", entry), schemas) for entry in entries]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _call(function: Mapping[str, Any], schemas: Mapping[str, Schema]) -> tuple[str, str]:
    name, arguments = function["name"], function.get("arguments", function.get("parameters"))
    if not isinstance(name, str):
        raise ValueError("a call without a name")
    if isinstance(arguments, str):
        return name, arguments if isinstance(json.loads(arguments or "{}"), dict) else "{}"
    parameters = schemas.get(name, {})
    written = [
        f"{json.dumps(key, ensure_ascii=False)}: {_value(value, types_of(schema_of(parameters, key), parameters))}"
        for key, value in (arguments or {}).items()
    ]
    return name, "{" + ", ".join(written) + "}"


def _value(value: Any, types: frozenset[str]) -> str:
    """A value as JSON; text is converted by the tool's schema."""
    if isinstance(value, str) and not is_text(types):
        return converted(value, types)
    return json.dumps(value, ensure_ascii=False)


def transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """A transform with its placeholders filled in. Raises KeyError."""
    if isinstance(transform, Mapping):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    found = _PLACEHOLDER.match(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for key in found[1].split("."):
        value = value[key]
    return value


def parsed(text: str, name: str, args: Mapping[str, Any], patience: Patience, depth: int = 0) -> Any:
    """The result of a content parser for a text. Raises ValueError, KeyError or SlowPatternError."""
    if depth > MAX_DEPTH:
        raise ValueError("parsers are nested too deep")
    return _PARSERS[name](text, args, patience, depth)


def _text(text: str, args: Mapping[str, Any], *_: Any) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Mapping[str, Any], patience: Patience, depth: int) -> Any:
    delimiters = args.get("string_delims") or []
    for opening, closing in delimiters:
        if opening != closing:
            parts = regex.compile(f"{re.escape(opening)}(.*?){re.escape(closing)}", regex.DOTALL)
            text = patience.timed(partial(parts.sub, lambda match: '"' + escaped(match[1]) + '"'), text)
    quote = next((opening for opening, closing in delimiters if opening == closing), "")
    reader = JsonText(quote)
    out = reader.push(text)[0] + reader.finish(is_whole=True)
    try:
        return json.loads(out)
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _xml(text: str, args: Mapping[str, Any], patience: Patience, depth: int) -> dict[str, Any]:
    pattern = regex.compile(args["tag_pattern"], regex.DOTALL)
    found: dict[str, Any] = {}
    for match in patience.timed(partial(_all_of, pattern), text):
        groups = match.groupdict()
        value = _inner(groups.get("value") or "", args, patience, depth)
        key = groups["key"]
        if key in found and args.get("merge_duplicates"):
            known = found[key] if isinstance(found[key], list) else [found[key]]
            value = [*known, value]
        found[key] = value
    return found


def _lines(text: str, args: Mapping[str, Any], patience: Patience, depth: int) -> dict[str, Any]:
    between = args.get("kv_sep", ":")
    pairs = (line.split(between, 1) for line in text.split(args.get("line_sep", "\n")) if between in line)
    return {_text(key, args): _inner(_text(value, args), args, patience, depth) for key, value in pairs}


def _all_of(pattern: Any, text: str, *, timeout: float) -> list[Any]:
    return list(pattern.finditer(text, timeout=timeout))


def _inner(text: str, args: Mapping[str, Any], patience: Patience, depth: int) -> Any:
    """A value parsed by the nested parser."""
    nested = args.get("value_parser")
    return parsed(text, nested.get("name", "text"), nested.get("args") or {}, patience, depth + 1) if nested else text


_PARSERS: dict[str, Callable[[str, Mapping[str, Any], Patience, int], Any]] = {
    "text": _text,
    "int": lambda text, args, *_: int(_text(text, args)),
    "float": lambda text, args, *_: float(_text(text, args)),
    "bool": lambda text, args, *_: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml,
    "kv-lines": _lines,
}
PARSERS = frozenset(_PARSERS)
