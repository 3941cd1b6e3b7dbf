"""The routes of files and batches, in OpenAI's form."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Literal

from fastapi import Request, Response
from pydantic import Field, StrictStr
from starlette.responses import StreamingResponse

from common.errors import InvalidRequestError, OverloadedError
from gateway.batches.openapi import batch_api
from gateway.batches.records import BatchRecord, FileRecord
from gateway.batches.store import BatchStore
from gateway.batches.upload import receive_file
from gateway.http.application import Routes
from gateway.http.body import BodyLimits, read_fields
from gateway.http.exchange import request_scope
from gateway.http.fields import Metadata, StrictFields
from gateway.http.problem import json_response
from gateway.keeping.paging import Page, listed, page_asked

MAX_UPLOADS = 8  # concurrent uploads; each holds a part and a line in memory
MAX_TENANT_UPLOADS = 4
BODY_LIMITS = BodyLimits(max_bytes=64 << 10)
FILES_PAGE = (10_000, 10_000)  # a list's entries: by default, at most
BATCHES_PAGE = (20, 100)


class BatchRequest(StrictFields):
    """Body of POST /v1/batches."""

    unsupported = {"output_expires_after": "files are kept for a time that the server sets (--keep-days)"}  # noqa: RUF012

    input_file_id: Annotated[StrictStr, Field(min_length=1, max_length=64)]
    endpoint: StrictStr
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchRoutes:
    """Files and batches. `endpoints`: the paths of batch lines."""

    def __init__(self, store: BatchStore, endpoints: Sequence[str]) -> None:
        self._store = store
        self._endpoints = endpoints
        self._uploads = Counter[str]()  # by tenant
        self.routes = Routes(
            posts={
                "/v1/files": self.upload,
                "/v1/batches": self.create,
                "/v1/batches/{batch_id}/cancel": self.cancel,
            },
            gets={
                "/v1/files": self.files,
                "/v1/files/{file_id}": self.file,
                "/v1/files/{file_id}/content": self.content,
                "/v1/batches": self.batches,
                "/v1/batches/{batch_id}": self.batch,
            },
            deletes={"/v1/files/{file_id}": self.delete},
            api=batch_api(BatchRequest, endpoints),
        )

    # -- files -------------------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        """Store a JSONL file of purpose `batch`; it is on disk when this answers."""
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
        query = request.query_params
        page = page_asked(query, default=FILES_PAGE[0], most=FILES_PAGE[1], others={"purpose"})
        found = await self._store.files(_tenant(request))
        if "purpose" in query:
            found = [file for file in found if file.purpose == query["purpose"]]
        return _listed(found, page)

    async def file(self, request: Request) -> Response:
        return json_response((await self._file(request)).as_json())

    async def content(self, request: Request) -> Response:
        record = await self._file(request)
        headers = {"content-length": str(record.bytes)}
        if request.method == "HEAD":  # a HEAD reads nothing
            return Response(headers=headers, media_type="application/octet-stream")
        parts = self._store.parts(record.id, record.parts)
        # Parts may expire before the record, which is an error only before the answer begins.
        first = await anext(parts, b"")
        return StreamingResponse(_flow(first, parts), media_type="application/octet-stream", headers=headers)

    async def delete(self, request: Request) -> Response:
        """Delete a file, unless a running batch reads it."""
        file_id = request.path_params["file_id"]
        await self._store.delete_file(_tenant(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> FileRecord:
        return await self._store.file(_tenant(request), request.path_params["file_id"])

    # -- batches -----------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        """Run a file's lines; the batch is on disk when this answers."""
        body = await read_fields(request, BODY_LIMITS, BatchRequest)
        if body.endpoint not in self._endpoints:
            raise InvalidRequestError(f"endpoint: must be {' or '.join(self._endpoints)}", param="endpoint")
        record = await self._store.new_batch(
            _tenant(request), input_file_id=body.input_file_id, endpoint=body.endpoint, metadata=body.metadata
        )
        return json_response(record.as_json())

    async def batches(self, request: Request) -> Response:
        page = page_asked(request.query_params, default=BATCHES_PAGE[0], most=BATCHES_PAGE[1], has_order=False)
        return _listed(await self._store.batches(_tenant(request)), page)

    async def batch(self, request: Request) -> Response:
        record = await self._store.batch(_tenant(request), request.path_params["batch_id"])
        return json_response(record.as_json())

    async def cancel(self, request: Request) -> Response:
        """Stop running lines of a batch; finished ones stay in its output file."""
        record = await self._store.cancel(_tenant(request), request.path_params["batch_id"])
        return json_response(record.as_json())


def _tenant(request: Request) -> str:
    return request_scope(request.scope).tenant.name


def _listed(found: Sequence[FileRecord | BatchRecord], page: Page) -> Response:
    """Raises NotKeptError."""
    records, more = page.of(found, lambda record: record.id)
    return json_response(listed([record.as_json() for record in records], has_more=more))


async def _flow(first: bytes, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for part in parts:
        yield part
