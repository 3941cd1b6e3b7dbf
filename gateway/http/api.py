"""Parts of the OpenAPI document: each room describes its paths, `gateway.openapi` joins them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

Json = dict[str, Any]
REF = "#/components/schemas/"
JSON = "application/json"
STATUSES = {
    400: "a field is wrong; the error names it",
    401: "no valid API key",
    403: "this key may not do that",
    404: "no such model or thing",
    408: "the request was not complete in time",
    409: "not as things are now",
    413: "the body is too large",
    415: "the body is packed, or of a type, that is not read here",
    422: "a field is wrong; TGI's paths say it so",
    424: "a worker failed the request; TGI's paths say it so",
    429: "no room or no budget now; Retry-After says when",
    431: "the headers are too large",
    500: "a mistake of the server",
    503: "no worker can serve this now",
    504: "the deadline passed",
}
ERROR: Json = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPart:
    """Operations by path and method, the bodies validated by classes, and hand-written schemas."""

    paths: Mapping[str, Mapping[str, Json]]
    bodies: tuple[type[BaseModel], ...] = ()
    schemas: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def merged(cls, parts: Iterable[ApiPart]) -> ApiPart:
        paths: dict[str, Mapping[str, Json]] = {}
        bodies: list[type[BaseModel]] = []
        schemas: dict[str, Json] = {}
        for part in parts:
            for path, operations in part.paths.items():
                known = paths.get(path, {})
                shared = {method: _either(known[method], operations[method]) for method in known.keys() & operations}
                paths[path] = {**known, **operations, **shared}
            bodies += part.bodies
            schemas |= part.schemas
        return cls(paths=paths, bodies=tuple(bodies), schemas=schemas)


def _either(first: Json, other: Json) -> Json:
    """The union of two operations: the answers of either, the parameters of both."""
    one, two = (part["responses"]["200"]["content"].get(JSON, {}).get("schema", {}) for part in (first, other))
    answers = _ok({JSON: {"schema": {"anyOf": [*one.get("anyOf", [one]), two]}}})
    known = {each["name"] for each in first["parameters"]}
    further = [each for each in other["parameters"] if each["name"] not in known]
    return first | {
        "responses": first["responses"] | {"200": answers},
        "parameters": [*first["parameters"], *further],
    }


def fields(properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def ref(name: str) -> Json:
    return {"$ref": REF + name}


def get(
    path: str,
    summary: str,
    *media_types: str,
    query: tuple[Json, ...] = (),
    error: str = "Error",
    answer: Json | None = None,
) -> Json:
    """A GET that answers with one of `media_types`; JSON without a fixed form unless `answer` gives it."""
    content = {kind: {"schema": answer} if answer and kind == JSON else {} for kind in media_types}
    return {
        "summary": summary,
        "responses": {"200": _ok(content)} | errors(error),
        "parameters": [*path_parameters(path), *query],
    }


def post(body: type[BaseModel], answer: Json, *, stream_type: str = "", error: str = "Error") -> Json:
    """A POST of a JSON body. With `stream_type` the answer may also be such a stream."""
    content: Json = {JSON: {"schema": answer}}
    if stream_type:
        content[stream_type] = {}
    return {
        "summary": (body.__doc__ or "").strip(),
        "requestBody": {"required": True, "content": {JSON: {"schema": ref(body.__name__)}}},
        "responses": {"200": _ok(content)} | errors(error),
    }


def errors(schema: str = "Error") -> Json:
    """The errors that any operation may return."""
    content: Json = {JSON: {"schema": ref(schema)}}
    return {str(status): {"description": text, "content": content} for status, text in STATUSES.items()}


def path_parameters(path: str) -> list[Json]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _ok(content: Json) -> Json:
    return {"description": "OK", "content": content}
