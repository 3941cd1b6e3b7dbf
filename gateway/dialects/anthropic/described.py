"""Anthropic's answers for the OpenAPI document. Further fields may be added."""

from __future__ import annotations

from gateway.http.api import fields, ref
from gateway.http.problem import Json

_TEXT: Json = {"type": "string"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_INTEGER: Json = {"type": "integer"}
_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")
_MODEL: Json = fields(
    {
        "type": {"const": "model"},
        "id": _TEXT,
        "display_name": _TEXT,
        "created_at": {"type": "string", "format": "date-time"},
        "lifecycle": {"const": "active"},
        "max_input_tokens": {"type": ["integer", "null"]},
        "max_tokens": {"type": ["integer", "null"]},
    }
)

ANSWERS: dict[str, Json] = {
    "AnthropicMessage": fields(
        {
            "id": _TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _TEXT,
            "content": {"type": "array", "items": fields({"type": {"enum": ["text", "thinking", "tool_use"]}})},
            "stop_reason": {"enum": list(_REASONS)},
            "stop_sequence": _TEXT_OR_NULL,
            "usage": fields(dict.fromkeys(_COUNTS, _INTEGER)),
        }
    ),
    "AnthropicModel": _MODEL,
    "AnthropicModelList": fields(
        {
            "data": {"type": "array", "items": ref("AnthropicModel")},
            "first_id": _TEXT_OR_NULL,
            "last_id": _TEXT_OR_NULL,
            "has_more": {"type": "boolean"},
        }
    ),
    "AnthropicError": fields(
        {"type": {"const": "error"}, "error": fields({"type": _TEXT, "message": _TEXT}), "request_id": _TEXT}
    ),
}
