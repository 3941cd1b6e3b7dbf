"""A streaming parser of multipart/form-data: the file is passed on in pieces, never held whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException

from common.errors import InvalidRequestError, OverloadedError, ServingError
from gateway.batches.records import FileRecord
from gateway.batches.store import BatchStore
from gateway.http.body import CLOSE, check_encoding

MAX_FIELD_BYTES = 4 << 10
MAX_PARTS = 16
MAX_FORM_BYTES = 64 << 10  # everything but the file
UPLOAD_TIMEOUT_S = 600.0
SILENCE_TIMEOUT_S = 30.0
MAX_DISCARDED_BYTES = 16 << 20  # dropped after a file was refused
DISCARD_TIMEOUT_S = 5.0
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the sender is told the fault
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,255}\Z")


class FileForm:
    """The form of POST /v1/files: takes bytes, yields the file's bytes, keeps the fields."""

    def __init__(self, content_type: str) -> None:
        """Raises InvalidRequestError for a malformed form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequestError("the body must be multipart/form-data, with the fields purpose and file")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._name, self._parts, self._ended = "", 0, False
        self._headers: dict[bytes, bytes] = {}
        self._header = [bytearray(), bytearray()]
        self._value = bytearray()
        self._file: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise InvalidRequestError(f"the body is no form: {error}"[:300]) from None

    def feed(self, data: bytes) -> list[bytes]:
        """Take more of the body; return the file's bytes in it. Raises InvalidRequestError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError(f"the body is no form: {error}"[:300]) from None
        found, self._file = self._file, []
        return found

    def finish(self) -> str:
        """Finish the body; return the file's name. Raises InvalidRequestError for an incomplete or invalid form."""
        if not self._ended:
            raise InvalidRequestError("the form is not complete: its closing boundary is missing")
        if self.filename is None:
            raise InvalidRequestError("file: this field is required", param="file")
        if "purpose" not in self.fields:
            raise InvalidRequestError("purpose: this field is required", param="purpose")
        return self.filename

    def _on_part_begin(self) -> None:
        self._parts += 1
        self._headers, self._header, self._name = {}, [bytearray(), bytearray()], ""
        if self._parts > MAX_PARTS:
            raise InvalidRequestError(f"a form has at most {MAX_PARTS} fields")

    def _on_header_end(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = [bytearray(), bytearray()]

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._value.clear()
        if self._name == "file":
            if self.filename is not None:
                raise InvalidRequestError("file: send one file at a time", param="file")
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            if not _NAME.match(name):
                raise InvalidRequestError("file: needs a filename of 1 to 255 characters", param="file")
            self.filename = name
        elif self._name != "purpose":
            known = self._name.partition("[")[0] == "expires_after"
            why = "files are kept for a time that the server sets (--keep-days)" if known else "unknown field"
            param = self._name[:100]
            raise InvalidRequestError(f"{param}: {why}; leave it out", param=param)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequestError(f"{self._name}: longer than {MAX_FIELD_BYTES} bytes", param=self._name)

    def _on_part_end(self) -> None:
        if self._name != "file":
            value = self._value.decode("utf-8", "replace")
            if value != "batch":
                raise InvalidRequestError(f"purpose: only batch is supported, not {value[:50]!r}", param="purpose")
            self.fields[self._name] = value

    def _on_end(self) -> None:
        self._ended = True


async def receive_file(request: Request, store: BatchStore, tenant: str) -> FileRecord:
    """Store a request's file. Raises HTTPException 413 and 408, InvalidRequestError and OverloadedError."""
    body = request.stream()
    try:
        return await _received(request, body, store, tenant)
    except (InvalidRequestError, OverloadedError, HTTPException):
        await _discard_rest(body)
        raise


async def _received(request: Request, body: AsyncGenerator[bytes, None], store: BatchStore, tenant: str) -> FileRecord:
    check_encoding(request)
    form = FileForm(request.headers.get("content-type", ""))
    announced, most = _announced(request), store.limits.file_bytes + MAX_FORM_BYTES
    if announced > most:
        raise _too_large(store.limits.file_bytes)
    writer = await store.new_file(tenant, announced)
    size = 0
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            while (chunk := await asyncio.wait_for(anext(body, None), SILENCE_TIMEOUT_S)) is not None:
                size += len(chunk)
                if size > most:
                    raise _too_large(store.limits.file_bytes)
                for data in form.feed(chunk) if chunk else ():
                    await writer.write(data)
            return await writer.finish(form.finish())
    except BaseException as error:
        with contextlib.suppress(ServingError):
            await asyncio.shield(writer.drop())
        if isinstance(error, TimeoutError):
            text = f"the file was not complete after {UPLOAD_TIMEOUT_S:g} s, or nothing of it came for {SILENCE_TIMEOUT_S:g} s"
            raise HTTPException(408, text, CLOSE) from None
        raise


async def _discard_rest(body: AsyncGenerator[bytes, None]) -> None:
    """Read some of the rest: a client still sending would see an early close as a broken connection."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            async for chunk in body:
                size += len(chunk)
                if size > MAX_DISCARDED_BYTES:
                    return


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"the file is larger than {most} bytes: split it", CLOSE)
