"""The routes of files and batches, in OpenAI's form."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Field, StrictStr, field_validator
from starlette.responses import StreamingResponse

from common.errors import InvalidRequestError, OverloadedError
from gateway.batches.records import ENDPOINTS, BatchRecord, FileRecord
from gateway.batches.store import BatchStore, page_of
from gateway.batches.upload import receive_file
from gateway.body import read_body
from gateway.responses import json_response
from gateway.schema import MetadataKey, MetadataValue, StrictFields, parse_body

Endpoint = Callable[[Request], Awaitable[Response]]
MAX_UPLOADS = 8  # at a time: each may hold a part and a line in memory
MAX_TENANT_UPLOADS = 4
MAX_BODY_BYTES = 64 << 10
BODY_TIMEOUT_S = 60.0
FILES_PAGE = (10_000, 10_000)  # a list's entries: by default, at most
BATCHES_PAGE = (20, 100)


class BatchRequest(StrictFields):
    """Body of POST /v1/batches."""

    unsupported = {"output_expires_after": "files are kept for a time that the server sets (--batch-keep-days)"}  # noqa: RUF012

    input_file_id: Annotated[StrictStr, Field(min_length=1, max_length=64)]
    endpoint: StrictStr
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None

    @field_validator("endpoint")
    @classmethod
    def _served(cls, endpoint: str) -> str:
        if endpoint not in ENDPOINTS:
            raise ValueError(f"must be {' or '.join(ENDPOINTS)}")
        return endpoint


class BatchRoutes:
    """Endpoints by path."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._uploads = Counter[str]()  # by tenant
        self.posts: dict[str, Endpoint] = {
            "/v1/files": self.upload,
            "/v1/batches": self.create,
            "/v1/batches/{batch_id}/cancel": self.cancel,
        }
        self.gets: dict[str, Endpoint] = {
            "/v1/files": self.files,
            "/v1/files/{file_id}": self.file,
            "/v1/files/{file_id}/content": self.content,
            "/v1/batches": self.batches,
            "/v1/batches/{batch_id}": self.batch,
        }
        self.deletes: dict[str, Endpoint] = {"/v1/files/{file_id}": self.delete}

    # -- files -------------------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        """Keep a JSONL file of purpose `batch`; it is on the disk when this answers."""
        tenant = _tenant(request)
        if self._uploads.total() >= MAX_UPLOADS or self._uploads[tenant] >= MAX_TENANT_UPLOADS:
            raise OverloadedError(f"{self._uploads.total()} files are being uploaded here: try again later")
        self._uploads[tenant] += 1
        try:
            record = await receive_file(request, self._store, tenant)
        finally:
            self._uploads[tenant] -= 1
        return json_response(record.as_json())

    async def files(self, request: Request) -> Response:
        """The tenant's files, the newest first."""
        query = _query(request, {"purpose", "after", "limit", "order"})
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order: must be asc or desc", param="order")
        found = await self._store.files(_tenant(request))
        if "purpose" in query:
            found = [file for file in found if file.purpose == query["purpose"]]
        limit = _limit(query, *FILES_PAGE)
        page, more = page_of(found, after=query.get("after", ""), limit=limit, newest_first=order == "desc")
        return _list(page, more)

    async def file(self, request: Request) -> Response:
        """One file's description."""
        return json_response((await self._file(request)).as_json())

    async def content(self, request: Request) -> Response:
        """A file, byte by byte."""
        record = await self._file(request)
        headers = {"content-length": str(record.bytes)}
        if request.method == "HEAD":  # nothing is read that isn't sent
            return Response(headers=headers, media_type="application/octet-stream")
        parts = self._store.parts(record.id, record.parts)
        first = await anext(parts, b"")  # they expire before the record does: that is said before the answer begins
        return StreamingResponse(_flow(first, parts), media_type="application/octet-stream", headers=headers)

    async def delete(self, request: Request) -> Response:
        """Delete a file; one that a running batch reads is kept."""
        file_id = request.path_params["file_id"]
        await self._store.delete_file(_tenant(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> FileRecord:
        return await self._store.file(_tenant(request), request.path_params["file_id"])

    # -- batches -----------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """Run a file's lines; the batch is on the disk when this answers."""
        raw = await read_body(request, max_bytes=MAX_BODY_BYTES, timeout_s=BODY_TIMEOUT_S)
        body = parse_body(raw, BatchRequest)
        record = await self._store.new_batch(
            _tenant(request), input_file_id=body.input_file_id, endpoint=body.endpoint, metadata=body.metadata
        )
        return json_response(record.as_json())

    async def batches(self, request: Request) -> Response:
        """The tenant's batches, the newest first."""
        query = _query(request, {"after", "limit"})
        found = await self._store.batches(_tenant(request))
        page, more = page_of(found, after=query.get("after", ""), limit=_limit(query, *BATCHES_PAGE))
        return _list(page, more)

    async def batch(self, request: Request) -> Response:
        """One batch, and how far it is."""
        record = await self._store.batch(_tenant(request), request.path_params["batch_id"])
        return json_response(record.as_json())

    async def cancel(self, request: Request) -> Response:
        """Run no more of a batch's lines; those that ran are in its output file."""
        record = await self._store.cancel(_tenant(request), request.path_params["batch_id"])
        return json_response(record.as_json())


def _tenant(request: Request) -> str:
    name: str = request.scope["tenant"].name
    return name


def _query(request: Request, known: set[str]) -> dict[str, str]:
    for name in request.query_params:
        if name not in known:
            raise InvalidRequestError(f"unknown parameter {name[:100]!r}: remove it", param=name[:100])
    return dict(request.query_params)


def _limit(query: dict[str, str], default: int, most: int) -> int:
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= most):
        raise InvalidRequestError(f"limit: must be 1 to {most}", param="limit")
    return int(text)


def _list(page: list[Any], more: bool) -> Response:
    records: list[FileRecord | BatchRecord] = page
    data = [record.as_json() for record in records]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": data, **ends, "has_more": more})


async def _flow(first: bytes, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for part in parts:
        yield part
