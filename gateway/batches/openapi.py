"""The Batch API's part of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from gateway.http.api import ApiPart, errors, fields, path_parameters, post, ref
from gateway.http.problem import Json

_WHEN: Json = {"type": ["integer", "null"]}
_ID: Json = {"type": ["string", "null"]}
BATCH_SCHEMAS: dict[str, Json] = {
    "File": fields(
        {
            "id": {"type": "string"},
            "object": {"const": "file"},
            "bytes": {"type": "integer"},
            "created_at": {"type": "integer"},
            "expires_at": {"type": "integer"},
            "filename": {"type": "string"},
            "purpose": {"enum": ["batch", "batch_output"]},
            "status": {"const": "processed"},
        }
    ),
    "Batch": fields(
        {
            "id": {"type": "string"},
            "object": {"const": "batch"},
            "endpoint": {"type": "string"},
            "errors": {"type": ["object", "null"]},
            "input_file_id": {"type": "string"},
            "completion_window": {"const": "24h"},
            "status": {"type": "string"},
            "output_file_id": _ID,
            "error_file_id": _ID,
            "created_at": {"type": "integer"},
            "expires_at": {"type": "integer"},
            **{f"{status}_at": _WHEN for status in ("in_progress", "finalizing", "completed", "failed")},
            **{f"{status}_at": _WHEN for status in ("expired", "cancelling", "cancelled")},
            "request_counts": fields({name: {"type": "integer"} for name in ("total", "completed", "failed")}),
            "metadata": {"type": ["object", "null"]},
        }
    ),
}


def batch_api(create: type[BaseModel], endpoints: Sequence[str]) -> ApiPart:
    """The operations. A batch's `endpoint` is one of `endpoints`; `create` is its body."""
    file, batch = ref("File"), ref("Batch")
    upload = _operation("/v1/files", "Keep a JSONL file of purpose `batch`.", file)
    form = fields({"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}})
    upload["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    deleted = fields({"id": {"type": "string"}, "object": {"const": "file"}, "deleted": {"const": True}})
    purpose, order = {"enum": ["batch", "batch_output"]}, {"enum": ["asc", "desc"]}
    queries = [_query("purpose", purpose), _query("order", order), *_paging(10_000)]
    files, batches = (
        "The files of this key's tenant, the newest first.",
        "The batches of this key's tenant, the newest first.",
    )
    one_file, content, one_batch = "/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/batches/{batch_id}"
    cancel = f"{one_batch}/cancel"
    created = post(create, batch)
    narrowed = {"allOf": [ref(create.__name__), {"properties": {"endpoint": {"enum": list(endpoints)}}}]}
    created["requestBody"]["content"]["application/json"]["schema"] = narrowed
    return ApiPart(
        paths={
            "/v1/files": {"post": upload, "get": _operation("/v1/files", files, _listed(file), *queries)},
            one_file: {
                "get": _operation(one_file, "One file's description.", file),
                "delete": _operation(one_file, "Delete a file.", deleted),
            },
            content: {"get": _operation(content, "A file, byte by byte.", {}, media="application/octet-stream")},
            "/v1/batches": {
                "post": created,
                "get": _operation("/v1/batches", batches, _listed(batch), *_paging(100)),
            },
            one_batch: {"get": _operation(one_batch, "One batch, and how far it is.", batch)},
            cancel: {"post": _operation(cancel, "Run no more of a batch's lines.", batch)},
        },
        bodies=(create,),
        schemas=BATCH_SCHEMAS,
    )


def _operation(path: str, summary: str, answer: Json, *queries: Json, media: str = "application/json") -> Json:
    content: Json = {media: {"schema": answer} if answer else {}}
    responses = {"200": {"description": "OK", "content": content}} | errors()
    return {"summary": summary, "parameters": [*path_parameters(path), *queries], "responses": responses}


def _listed(entry: Json) -> Json:
    return fields(
        {"object": {"const": "list"}, "data": {"type": "array", "items": entry}, "has_more": {"type": "boolean"}}
    )


def _query(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "schema": schema}


def _paging(most: int) -> tuple[Json, Json]:
    return _query("after", {"type": "string"}), _query("limit", {"type": "integer", "minimum": 1, "maximum": most})
