"""Reading a request's body within bounds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import Request
from starlette.exceptions import HTTPException

CLOSE = {"connection": "close"}  # the rest of the body is not read


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """The largest body, and the longest time for it."""

    max_bytes: int
    timeout_s: float = 60.0


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The whole body. Raises HTTPException 413 when too large, 408 when too slow."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.max_bytes:
                    raise HTTPException(413, f"the body is larger than {limits.max_bytes} bytes", CLOSE)
                chunks.append(chunk)
    except TimeoutError:
        raise HTTPException(408, f"the body was not complete after {limits.timeout_s:g} s", CLOSE) from None
    return b"".join(chunks)
