"""Constrained formats under the names of OpenAI, vLLM and TGI."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gateway.grammars import wanted
from gateway.grammars.wanted import AS_DUMPED, Wanted, Whitespace
from gateway.http.fields import TextsLeft

FOLLOWED = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "regex",
    "ebnf",
    "grammar",
    "json_schema",
)
_TYPED = ("response_format", "grammar", "text")  # fields that may be typed objects; the Responses API has the last
_OTHERS = {"regex": "regex", "ebnf": "grammar", "grammar": "grammar", "json_schema": "json"}
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
    "disable_fallback",
    "backend",
)
_TYPES = ("text", "json_object", "json_schema", "structural_tag", "json", "regex")
_ANY_OBJECT = {"type": "object"}

_FREE = {"type": "object"}
RESPONSE_FORMAT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "schema": _FREE,
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "structural_tag"}, "format": {"type": "object"}},
            "required": ["type"],
            "anyOf": [{"required": ["format"]}, {"required": ["structures", "triggers"]}],
        },
    ]
}
STRUCTURED_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {
                "json": {"type": ["object", "string"]},
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}},
                "grammar": {"type": "string"},
                "json_object": {"type": "boolean", "description": "false: nothing is followed"},
                "structural_tag": {"type": ["object", "string"]},
                "disable_any_whitespace": {"type": "boolean"},
                "disable_additional_properties": {"type": "boolean"},
                "whitespace_pattern": {"type": "string"},
            },
            "additionalProperties": False,
            "minProperties": 1,
        },
    ]
}


def wanted_of(fields: Mapping[str, Any]) -> Wanted | None:
    """The single format that a body asks for. Raises ValueError that begins with a field's name."""
    typed = [_typed(name, fields[name]) for name in _TYPED if isinstance(fields.get(name), dict)]
    found = [one for one in (*typed, _structured(fields), *_guided(fields), *_others(fields)) if one is not None]
    if len(found) > 1:
        raise ValueError(f"{found[1].field}: an answer can't follow {found[0].field} as well: send one of them")
    return found[0] if found else None


def _typed(field: str, value: Mapping[str, Any]) -> Wanted | None:
    """The format in an object with a `type`: OpenAI's response_format, or TGI's grammar."""
    match value.get("type"):
        case "text":
            return None
        case "json_object" | "json":
            schema = value.get("value") or value.get("schema") or _ANY_OBJECT  # TGI's and llama.cpp's
            return wanted.json_schema(field, _schema(schema, field))
        case "json_schema":
            described = _mapping(value.get("json_schema") or value.get("value"), f"{field}: json_schema")
            strict, schema = described.get("strict"), described.get("schema", _ANY_OBJECT)
            if strict not in (None, True, False):
                raise ValueError(f"{field}: strict must be true or false")
            return wanted.json_schema(field, _schema(schema, field), strict=bool(strict))
        case "regex":
            return wanted.regex(field, _text(value.get("value") or value.get("pattern"), f"{field}: value"))
        case "structural_tag":
            return _structural_tag(value, field)
        case _:
            raise ValueError(f"{field}: type must be one of {', '.join(_TYPES)}")


def _structured(fields: Mapping[str, Any]) -> Wanted | None:
    field, value = "structured_outputs", fields.get("structured_outputs")
    if value is None:
        return None
    given = {name: said for name, said in value.items() if said is not None and said is not False}
    unknown = given.keys() - {*_KINDS, *_OPTIONS}
    if unknown:
        raise ValueError(f"{field}: unknown field {min(unknown)!r}: remove it or check its spelling")
    kinds = [name for name in _KINDS if name in given]
    if not given and value.get("json_object") is False:
        return None
    if len(kinds) != 1:
        raise ValueError(f"{field}: needs exactly one of {', '.join(_KINDS)}")
    whitespace = _whitespace(given.get("whitespace_pattern"), f"{field}: whitespace_pattern")
    if given.get("disable_any_whitespace"):
        whitespace = Whitespace(is_allowed=False)
    said = given[kinds[0]]
    if kinds[0] == "structural_tag":
        said = _read(said, f"{field}: structural_tag")
        return _structural_tag(_mapping(said, f"{field}: structural_tag"), field, whitespace)
    if kinds[0] == "json" and given.get("disable_additional_properties"):
        try:
            said = _closed(_read(said, f"{field}: json"))
        except RecursionError:
            raise ValueError(f"{field}: json is too deep") from None
    return _of_kind(kinds[0], said, field, whitespace)


def _guided(fields: Mapping[str, Any]) -> list[Wanted | None]:
    whitespace = _whitespace(fields.get("guided_whitespace_pattern"), "guided_whitespace_pattern")
    return [
        _of_kind(name.removeprefix("guided_"), fields[name], name, whitespace)
        for name in _GUIDED
        if fields.get(name) is not None
    ]


def _others(fields: Mapping[str, Any]) -> list[Wanted]:
    """The formats of SGLang and llama.cpp, for which "" is none."""
    said = {name: fields.get(name) for name in _OTHERS}
    return [
        _of_kind(_OTHERS[name], value, name, _whitespace(None, name))
        for name, value in said.items()
        if value not in (None, "") and (name != "grammar" or isinstance(value, str))
    ]


def _of_kind(kind: str, said: Any, field: str, whitespace: Whitespace) -> Wanted:
    kinds: dict[str, Callable[[], Wanted]] = {
        "json": lambda: wanted.json_schema(field, _schema(said, field), whitespace=whitespace),
        "json_object": lambda: wanted.json_object(field, whitespace=whitespace),
        "regex": lambda: wanted.regex(field, _text(said, field)),
        "grammar": lambda: wanted.ebnf(field, _text(said, field)),
        "choice": lambda: wanted.choice(field, _texts(said, field)),
    }
    return kinds[kind]()


def _structural_tag(value: Mapping[str, Any], field: str, whitespace: Whitespace = AS_DUMPED) -> Wanted:
    """A structural tag: its `format`, or the older form with schemas between triggered tags."""
    if "format" in value:
        described = _mapping(value["format"], f"{field}: format")
        return wanted.structural_tag(field, described, whitespace=whitespace)
    if "structures" not in value:
        raise ValueError(f"{field}: a structural_tag needs a format, or structures and triggers")
    structures = [_mapping(one, f"{field}: structures") for one in _list(value["structures"], f"{field}: structures")]
    tags = [
        {
            "begin": _text(one.get("begin"), f"{field}: begin"),
            "content": {"type": "json_schema", "json_schema": _schema(one.get("schema", {}), field)},
            "end": _text(one.get("end", ""), f"{field}: end"),
        }
        for one in structures
    ]
    triggers = _texts(value.get("triggers"), f"{field}: triggers")
    tag = {"type": "triggered_tags", "tags": tags, "triggers": triggers}
    return wanted.structural_tag(field, tag, whitespace=whitespace)


def _closed(schema: Any) -> Any:
    """The schema with additionalProperties false where it is unset."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type", "object") == "object"
    return {"additionalProperties": False} | closed if is_object else closed


def _read(said: Any, name: str) -> Any:
    """Return the value of a field that may also be JSON text."""
    if not isinstance(said, str):
        return said
    try:
        TextsLeft().take(said)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    try:
        return json.loads(said)
    except (ValueError, RecursionError) as error:
        why = "too deep" if isinstance(error, RecursionError) else error
        raise ValueError(f"{name} isn't JSON: {why}") from None


def _whitespace(pattern: Any, name: str) -> Whitespace:
    return AS_DUMPED if pattern is None else Whitespace(pattern=_text(pattern, name))


def _schema(value: Any, field: str) -> Any:
    if not isinstance(value, dict | str | bool):
        raise ValueError(f"{field}: a schema must be an object")
    return value


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return value


def _texts(value: Any, name: str) -> list[str]:
    return [_text(one, name) for one in _list(value, name)]
