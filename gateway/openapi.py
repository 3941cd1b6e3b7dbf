"""The OpenAPI document of the gateway, at /openapi.json: made from the classes that check the requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.batches.openapi import BATCH_SCHEMAS, batch_paths
from gateway.batches.records import ENDPOINTS
from gateway.batches.routes import BatchRequest
from gateway.console.routes import DrainOrder, RolesOrder
from gateway.schema import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    StreamOptions,
    TokenizeRequest,
)
from gateway.tenants import ADMIN_PATHS, OPERATOR_PATHS, is_open, is_under

Json = dict[str, Any]
_REF = "#/components/schemas/"
_BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    BatchRequest,
    RolesOrder,
    DrainOrder,
)
_OTHERS: tuple[type[BaseModel], ...] = (Message, StreamOptions)
_MODELS = {kind.__name__: kind for kind in _BODIES + _OTHERS}
_OFF: Json = {
    "enum": [None, False, [], {}],
    "description": "not supported: only an absent, null or empty value is accepted",
}
_TOKEN_IDS: Json = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_TEXT: Json = {"type": "string", "minLength": 1}
_NULL: Json = {"type": "null"}

# What validators say in code.
_BY_HAND: dict[str, Json] = {
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
            {
                "type": "array",
                "maxItems": MAX_STOPS,
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
            },
            _NULL,
        ]
    },
    "logit_bias": {
        "anyOf": [
            {
                "type": "object",
                "maxProperties": MAX_LOGIT_BIAS,
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            },
            _NULL,
        ]
    },
    "store": {"enum": [None, False]},
    "service_tier": {"enum": [None, "auto", "default"]},
}
_OF_MODEL: dict[str, dict[str, Json]] = {
    "BatchRequest": {"endpoint": {"enum": list(ENDPOINTS)}},
    "ChatRequest": {
        "response_format": {"enum": [None, {"type": "text"}]},
        "tool_choice": {"enum": [None, "none", "auto"]},
    },
    "CompletionRequest": {
        "prompt": {
            "anyOf": [
                _TEXT,
                _TOKEN_IDS,
                {"type": "array", "minItems": 1, "items": _TEXT},
                {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
            ]
        },
    },
    "Message": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
                _NULL,
            ]
        },
    },
}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE: Json = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
}
_STATUSES = {
    400: "a field is wrong; `param` names it",
    401: "no valid API key",
    403: "this key may not do that",
    404: "no such model or thing",
    409: "not as things are now",
    408: "the request was not complete in time",
    413: "the body is too large",
    429: "no room or no budget now; Retry-After says when",
    431: "the headers are too large",
    500: "a mistake of the server",
    503: "no worker can serve this now",
    504: "the deadline passed",
}
_JSON = "application/json"
# path -> what it answers, and of which types; JSON is of no fixed form
_GETS: dict[str, tuple[str, ...]] = {
    "/v1/models": ("The served model, as a list.", _JSON),
    "/v1/models/{model}": ("One model.", _JSON),
    "/health": ("This process answers.", _JSON),
    "/ready": ("Whether a request would be served now.", _JSON),
    "/metrics": ("Prometheus text.", "text/plain; version=0.0.4"),
    "/version": ("Baton's version.", _JSON),
    "/debug/requests": ("Where the time of recent requests went.", _JSON),
    "/debug/requests/{request_id}": ("Every choice of one answer.", _JSON),
    "/openapi.json": ("This document.", _JSON),
}
_CONSOLE_GETS: dict[str, tuple[str, ...]] = {
    "/": ("The console, a page.", "text/html"),
    "/console/static/{name}": ("A file of the page.", "text/html", "text/css", "text/javascript", "image/svg+xml"),
    "/console/state": ("The fleet, and what all gateways do: docs/console.md.", _JSON),
    "/console/events": ("The same as server-sent events, as it changes.", "text/event-stream"),
}


def document(
    *, version: str, needs_key: bool, has_admin: bool = False, has_console: bool = False, has_batches: bool = True
) -> Json:
    """Return the document. `needs_key`: API keys are asked for; `has_admin`: there is an admin key, for operators' routes."""
    gets = _GETS | (_CONSOLE_GETS if has_console else {})
    paths: dict[str, Json] = {path: {"get": _get(path, *answer)} for path, answer in gets.items()}
    paths["/v1/chat/completions"] = {"post": _post("ChatRequest", _completion("chat.completion"), streams=True)}
    paths["/v1/completions"] = {"post": _post("CompletionRequest", _completion("text_completion"), streams=True)}
    paths["/tokenize"] = {
        "post": _post("TokenizeRequest", _object({"tokens": {"type": "array"}, "count": {"type": "integer"}}))
    }
    paths["/detokenize"] = {"post": _post("DetokenizeRequest", _object({"prompt": {"type": "string"}}))}
    if has_batches:
        paths |= batch_paths(_post("BatchRequest", {"$ref": f"{_REF}Batch"}), _errors())
    if has_console:
        answer = _object({"worker": {"type": "string"}, "roles": {"type": "array", "items": {"type": "string"}}})
        for order, body in (("roles", "RolesOrder"), ("drain", "DrainOrder")):
            path = f"/admin/workers/{{worker}}/{order}"
            paths[path] = {"post": _post(body, answer) | {"parameters": _path_parameters(path)}}
            paths[path]["post"]["requestBody"]["required"] = order == "roles"
    for path, operations in paths.items():
        for operation in operations.values():
            operation["security"] = _security(path, needs_key=needs_key, has_admin=has_admin)
    made: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": _schemas() | BATCH_SCHEMAS | {"Error": _ERROR, "Usage": _USAGE}},
    }
    made["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "an API key"},
        "admin": {"type": "http", "scheme": "bearer", "description": "an admin key"},
    }
    return made


def _security(path: str, *, needs_key: bool, has_admin: bool) -> list[Json]:
    if is_open(path):
        return []
    if is_under(path, ADMIN_PATHS) or (has_admin and is_under(path, OPERATOR_PATHS)):
        return [{"admin": []}]
    return [{"key": []}] if needs_key else []


def _schemas() -> dict[str, Json]:
    """The bodies as pydantic describes them, with what only validators know."""
    _, made = models_json_schema([(kind, "validation") for kind in _BODIES], ref_template=_REF + "{model}")
    schemas: dict[str, Json] = made["$defs"]
    for name, schema in schemas.items():
        required = schema.get("required", [])
        for field, rule in schema["properties"].items():
            by_hand = _OF_MODEL.get(name, {}).get(field) or _BY_HAND.get(field)
            if by_hand is not None:
                schema["properties"][field] = by_hand
            elif field not in required and not _may_be_null(rule):
                schema["properties"][field] = {"anyOf": [rule, _NULL]}  # null means absent
        unsupported: Mapping[str, str] = getattr(_MODELS[name], "unsupported", {})
        schema["properties"] |= dict.fromkeys(unsupported, _OFF)
    return schemas


def _may_be_null(rule: Json) -> bool:
    return _NULL in rule.get("anyOf", []) or ("type" not in rule and "anyOf" not in rule and "$ref" not in rule)


def _path_parameters(path: str) -> list[Json]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _get(path: str, summary: str, *media: str) -> Json:
    operation: Json = {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": {kind: {} for kind in media}}} | _errors(),
        "parameters": _path_parameters(path),
    }
    if path == "/debug/requests":
        limit = {"type": "string", "pattern": "^[0-9]{1,4}$"}
        operation["parameters"].append({"name": "limit", "in": "query", "schema": limit})
    return operation


def _post(body: str, answer: Json, *, streams: bool = False) -> Json:
    content: Json = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {}  # events, each with an object or [DONE]
    return {
        "summary": (_MODELS[body].__doc__ or "").strip(),
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": _REF + body}}}},
        "responses": {"200": {"description": "OK", "content": content}} | _errors(),
    }


def _errors() -> Json:
    schema = {"application/json": {"schema": {"$ref": f"{_REF}Error"}}}
    plain: Json = {"application/json": {}}  # /ready says its reason in another form
    return {
        str(status): {"description": text, "content": plain if status == 503 else schema}
        for status, text in _STATUSES.items()
    }


def _completion(kind: str) -> Json:
    choice = {"type": "object", "required": ["index", "finish_reason"]}
    return _object(
        {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "minItems": 1, "items": choice},
            "usage": {"$ref": f"{_REF}Usage"},
        }
    )


def _object(fields: Json) -> Json:
    return {"type": "object", "required": list(fields), "properties": fields}
