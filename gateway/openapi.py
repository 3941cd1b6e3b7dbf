"""The OpenAPI document, joined from each room's part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from gateway.dialects.dialect import Dialect
from gateway.dialects.table import DialectTable
from gateway.http.api import ERROR, JSON, REF, ApiPart, fields, path_parameters
from gateway.http.fields import OFF
from gateway.tenants.tenants import ADMIN_PATHS, BEARER, MODEL_PATHS, OPERATOR_PATHS, is_under

Json = dict[str, Any]


def document(
    parts: Iterable[ApiPart], *, version: str, dialects: DialectTable, needs_key: bool, needs_admin: bool
) -> Json:
    """Build the document. `needs_key`: API keys are required; `needs_admin`: operators' paths need the admin key."""
    whole = ApiPart.merged(parts)
    bodies = _schemas(whole)
    schemes = {"key": dict(BEARER.scheme), "admin": {**BEARER.scheme, "description": "an admin key"}}
    paths: dict[str, Json] = {}
    for path, operations in whole.paths.items():
        keys = {_scheme(owner): dict(owner.key.scheme) for owner in dialects.owners(path)} or {"key": schemes["key"]}
        schemes |= keys
        paths[path] = {
            method: _by_path(path, operation, bodies)
            | {"operationId": _operation_id(method, path)}
            | {
                "security": []
                if dialects.is_open(method.upper(), path)
                else _security(path, keys, needs_key=needs_key, needs_admin=needs_admin)
            }
            for method, operation in operations.items()
        }
    described: Json = _readable(
        {
            "openapi": "3.1.0",
            "info": {"title": "Baton", "version": version, "license": {"name": "Apache-2.0"}},
            "paths": paths,
            "components": {
                "schemas": _by_name(bodies | dict(whole.schemas) | {"Error": ERROR}),
                "securitySchemes": schemes,
            },
        }
    )
    described["components"]["schemas"]["Off"] = _one_of_kinds(OFF)
    return described


def _operation_id(method: str, path: str) -> str:
    """A name for generated clients: `post_v1_chat_completions`."""
    return "_".join([method, *re.findall(r"\w+", path)])


def _readable(part: Any) -> Any:
    """The document without constructs that client generators can't read: mixed enumerations, lists of unknown items, non-plain
    defaults.
    """
    if isinstance(part, list):
        return [_readable(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part == OFF:
        return {"$ref": f"{REF}Off"}
    if isinstance(part.get("enum"), list) and len({type(value) for value in part["enum"]}) > 1:
        return _one_of_kinds(part)
    kept = {name: _readable(each) for name, each in part.items() if name != "default" or _is_plain(part, each)}
    is_list = part.get("type") == "array" or (isinstance(part.get("type"), list) and "array" in part["type"])
    return {"items": {}} | kept if is_list else kept


def _is_plain(part: Json, default: Any) -> bool:
    """True if a schema may have this default; a field named `default` is none."""
    is_schema = isinstance(part.get("type"), str | list) or any(
        isinstance(part.get(name), list) for name in ("anyOf", "oneOf")
    )
    return not is_schema or isinstance(default, str | int | float)


def _by_name(schemas: Json) -> Json:
    """Schemas in which each variant of a union has its own name: generators write a class for each."""
    found: Json = {}
    for name, schema in schemas.items():
        forms = [
            (f"{name}{number}", form) if "properties" in form else ("", form)
            for number, form in enumerate(schema.get("oneOf", ()), 1)
        ]
        found |= {own: form for own, form in forms if own}
        told = {"oneOf": [{"$ref": f"{REF}{own}"} if own else form for own, form in forms]} if forms else {}
        found[name] = schema | told
    return found


def _one_of_kinds(schema: Json) -> Json:
    texts = [value for value in schema["enum"] if isinstance(value, str)]
    kinds: list[Json] = [{"type": "string", "enum": texts}] if texts else []
    kinds += [_only(value) for value in schema["enum"] if not isinstance(value, str)]
    return {name: each for name, each in schema.items() if name != "enum"} | {"anyOf": kinds}


def _only(value: Any) -> Json:
    match value:
        case None:
            return {"type": "null"}
        case []:
            return {"type": "array", "items": {}, "maxItems": 0}
        case {"type": str(kind)}:
            return fields({"type": {"const": kind}}) | {"additionalProperties": False}
        case dict():
            return {"type": "object", "maxProperties": 0}
        case _:
            return {"const": value}


def _schemas(whole: ApiPart) -> Json:
    """Schemas of the bodies, from their pydantic classes."""
    bodies: Sequence[Any] = [(body, "validation") for body in whole.bodies]
    return models_json_schema(bodies, ref_template=REF + "{model}")[1].get("$defs", {})


def _scheme(dialect: Dialect) -> str:
    return "key" if dialect.key is BEARER else f"key_{dialect.name}"


def _by_path(path: str, operation: Json, bodies: Json) -> Json:
    """An operation with its path parameters, which are not part of the body."""
    parameters = path_parameters(path)
    if not parameters:
        return operation
    names = {parameter["name"] for parameter in parameters}
    told: Json = {"parameters": parameters, **operation}
    if "requestBody" not in told:
        return told
    content = told["requestBody"]["content"]
    body = bodies[content[JSON]["schema"]["$ref"].removeprefix(REF)]
    properties = {name: rule for name, rule in body["properties"].items() if name not in names}
    required = [name for name in body.get("required", []) if name not in names]
    said = {JSON: {"schema": body | {"properties": properties, "required": required}}}
    return told | {"requestBody": {"required": bool(required), "content": content | said}}


def _security(path: str, keys: Iterable[str], *, needs_key: bool, needs_admin: bool) -> list[Json]:
    if is_under(path, ADMIN_PATHS) or (needs_admin and is_under(path, OPERATOR_PATHS)):
        return [{"admin": []}]
    own: list[Json] = [{key: []} for key in keys] if needs_key else []
    return [*own, {"admin": []}] if own and path in MODEL_PATHS else own
