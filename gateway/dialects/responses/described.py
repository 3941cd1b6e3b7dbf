"""Responses for the OpenAPI document. Further fields may be added."""

from __future__ import annotations

from gateway.http.api import fields, ref
from gateway.http.problem import Json

_TEXT: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_OBJECT_OR_NULL: Json = {"type": ["object", "null"]}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _fields(required: Json, **others: Json) -> Json:
    """An object of which only the `required` fields are always present."""
    return fields(required) | {"properties": required | others}


_OBJECTS = _list({"type": "object"})
_STATUS: Json = {"enum": ["in_progress", "completed", "incomplete"]}


def _item(kind: str, required: Json, **others: Json) -> Json:
    return _fields({"id": _TEXT, "type": {"const": kind}} | required, **others)


_CALL = {"status": _STATUS, "call_id": _TEXT, "name": _TEXT}

SCHEMAS: dict[str, Json] = {
    "Response": fields(
        {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": _INTEGER,
            "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
            "error": _OBJECT_OR_NULL,
            "incomplete_details": _OBJECT_OR_NULL,
            "model": _TEXT,
            "output": _list(ref("ResponseItem")),
            "usage": {"anyOf": [ref("ResponseUsage"), {"type": "null"}]},
            "parallel_tool_calls": {"type": "boolean"},
            "tool_choice": {},
            "tools": _OBJECTS,
        }
    ),
    "ResponseItem": {
        "oneOf": [
            _item("message", {"role": {"const": "assistant"}, "status": _STATUS, "content": _OBJECTS}),
            _item("reasoning", {"summary": _OBJECTS}, content=_OBJECTS, encrypted_content=_TEXT),
            _item("function_call", {**_CALL, "arguments": _TEXT}, namespace=_TEXT),
            _item("custom_tool_call", {**_CALL, "input": _TEXT}, namespace=_TEXT),
            _item("compaction", {"encrypted_content": _TEXT}),
        ]
    },
    "ResponseUsage": fields(
        {
            **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), _INTEGER),
            "input_tokens_details": fields({"cached_tokens": _INTEGER, "cache_write_tokens": _INTEGER}),
            "output_tokens_details": fields({"reasoning_tokens": _INTEGER}),
        }
    ),
    "ResponseInputTokens": fields({"object": {"const": "response.input_tokens"}, "input_tokens": _INTEGER}),
    "ResponseCompaction": fields(
        {
            "id": _TEXT,
            "object": {"const": "response.compaction"},
            "created_at": _INTEGER,
            "output": _OBJECTS,
            "usage": ref("ResponseUsage"),
        }
    ),
}
