"""Reading a request's body within bounds."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.exceptions import HTTPException

_CLOSE = {"connection": "close"}  # the rest of the body is not read


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises HTTPException 413 when it is larger than `max_bytes`, 408 when it takes longer than `timeout_s`."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise HTTPException(413, f"the body is larger than {max_bytes} bytes", _CLOSE)
                chunks.append(chunk)
    except TimeoutError:
        raise HTTPException(408, f"the body was not complete after {timeout_s:g} s", _CLOSE) from None
    return b"".join(chunks)
