"""The Batch API's part of the OpenAPI document."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
_REF = "#/components/schemas/"
_WHEN: Json = {"type": ["integer", "null"]}
_ID: Json = {"type": ["string", "null"]}


def _object(fields: Json) -> Json:
    return {"type": "object", "required": list(fields), "properties": fields}


BATCH_SCHEMAS: dict[str, Json] = {
    "File": _object(
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
    "Batch": _object(
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
            "request_counts": _object({name: {"type": "integer"} for name in ("total", "completed", "failed")}),
            "metadata": {"type": ["object", "null"]},
        }
    ),
}


def batch_paths(create: Json, errors: Json) -> dict[str, Json]:
    """The routes. `create`: POST /v1/batches, whose body is checked by a class; `errors`: what all routes may answer."""

    def operation(summary: str, answer: Json, *parameters: Json, media: str = "application/json") -> Json:
        content: Json = {media: {"schema": answer} if answer else {}}
        responses = {"200": {"description": "OK", "content": content}} | errors
        return {"summary": summary, "parameters": list(parameters), "responses": responses}

    file, batch = {"$ref": f"{_REF}File"}, {"$ref": f"{_REF}Batch"}
    upload = operation("Keep a JSONL file of purpose `batch`.", file)
    form = _object({"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}})
    upload["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    deleted = _object({"id": {"type": "string"}, "object": {"const": "file"}, "deleted": {"const": True}})
    purpose, order = {"enum": ["batch", "batch_output"]}, {"enum": ["asc", "desc"]}
    of_file, of_batch = _path("file_id"), _path("batch_id")
    return {
        "/v1/files": {
            "post": upload,
            "get": operation(
                "The files of this key's tenant, the newest first.",
                _listed(file),
                _query("purpose", purpose),
                _query("order", order),
                *_paging(10_000),
            ),
        },
        "/v1/files/{file_id}": {
            "get": operation("One file's description.", file, of_file),
            "delete": operation("Delete a file.", deleted, of_file),
        },
        "/v1/files/{file_id}/content": {
            "get": operation("A file, byte by byte.", {}, of_file, media="application/octet-stream")
        },
        "/v1/batches": {
            "post": create,
            "get": operation("The batches of this key's tenant, the newest first.", _listed(batch), *_paging(100)),
        },
        "/v1/batches/{batch_id}": {"get": operation("One batch, and how far it is.", batch, of_batch)},
        "/v1/batches/{batch_id}/cancel": {"post": operation("Run no more of a batch's lines.", batch, of_batch)},
    }


def _listed(entry: Json) -> Json:
    fields = {"object": {"const": "list"}, "data": {"type": "array", "items": entry}, "has_more": {"type": "boolean"}}
    return _object(fields)


def _path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "schema": schema}


def _paging(most: int) -> tuple[Json, Json]:
    return _query("after", {"type": "string"}), _query("limit", {"type": "integer", "minimum": 1, "maximum": most})
