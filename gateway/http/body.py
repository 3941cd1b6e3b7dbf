"""Reading a request's body within bounds."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

from fastapi import Request
from starlette.exceptions import HTTPException

from common.errors import InvalidRequestError

CLOSE = {"connection": "close"}  # the rest of the body is not read


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """The largest body, and the longest time for it."""

    max_bytes: int
    timeout_s: float = 60.0


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The whole body, unpacked. Raises HTTPException 413 when too large, 408 when too slow, 415 when not packed by gzip."""
    is_packed = check_encoding(request, "gzip")
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.max_bytes:
                    raise _too_large(limits)
                chunks.append(chunk)
    except TimeoutError:
        raise HTTPException(408, f"the body was not complete after {limits.timeout_s:g} s", CLOSE) from None
    body = b"".join(chunks)
    return await asyncio.to_thread(_unpacked, body, limits) if is_packed else body


def check_encoding(request: Request, *known: str) -> bool:
    """Whether the body has one of the `known` encodings; False: it has none. Raises HTTPException 415 for others."""
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding in ("", "identity"):
        return False
    if encoding not in known:
        remedy = f"send {' or '.join((*known, 'none'))}" if known else "send none"
        message = f"content-encoding: {encoding[:50]!r} is not supported here: {remedy}"
        raise HTTPException(415, message, CLOSE | {"accept-encoding": ", ".join(known) or "identity"})
    return True


def _unpacked(body: bytes, limits: BodyLimits) -> bytes:
    """A gzip body, as far as it may be large."""
    unpacking = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        unpacked = unpacking.decompress(body, limits.max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is no gzip, as content-encoding says: {error}") from None
    if len(unpacked) > limits.max_bytes:
        raise _too_large(limits)
    if not unpacking.eof or unpacking.unused_data:
        raise InvalidRequestError("the gzip body is not complete, or something follows it")
    return unpacked


def _too_large(limits: BodyLimits) -> HTTPException:
    return HTTPException(413, f"the body is larger than {limits.max_bytes} bytes", CLOSE)
