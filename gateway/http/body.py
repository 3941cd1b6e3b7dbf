"""Reading a request's body within limits, and validating it without delaying other streams."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException

from common.errors import InvalidRequestError, OverloadedError
from gateway.http.exchange import fields_of, request_scope
from gateway.http.fields import NOT_GIVEN, Body, Values, parse_body

CLOSE = {"connection": "close"}  # the rest of the body is not read
MAX_LARGEST_BODIES = 32  # read or validated at a time, or more smaller ones
SHORT_BYTES = 32 << 10  # parsed on the event loop itself, if they have few values
SHORT_VALUES = 2_000
Checked = TypeVar("Checked")
MAX_WINDOW_LOG = 23  # 8 MiB that a frame makes its reader hold
ZSTD_MODULES = ("compression.zstd", "backports.zstd")  # from Python 3.14 on, and for older ones
ZSTD_REMEDY = "install backports.zstd beside the gateway, or send gzip or none"
_LARGE = ThreadPoolExecutor(1, thread_name_prefix="large-body")  # one at a time


class Unpacker(Protocol):
    """The decompressor interface of zlib and zstd."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class Encoding(NamedTuple):
    """The decompressor of one encoding, and its exceptions."""

    unpacker: Callable[[], Unpacker]
    error: type[Exception]


def _found() -> dict[str, Encoding]:
    """The supported encodings by name in `content-encoding`."""
    found = {"gzip": Encoding(partial(zlib.decompressobj, 16 + zlib.MAX_WBITS), zlib.error)}
    for name in ZSTD_MODULES:
        try:
            zstd: Any = import_module(name)
        except ImportError:
            continue
        options = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
        return found | {"zstd": Encoding(partial(zstd.ZstdDecompressor, options=options), zstd.ZstdError)}
    return found


ENCODINGS = _found()


@dataclass(slots=True)
class Reading:
    """Bytes of bodies that are being read, or await validation."""

    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """The largest body, and the longest time for it."""

    max_bytes: int
    timeout_s: float = 60.0
    reading: Reading = field(default_factory=Reading)


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The whole body, decompressed. Raises HTTPException 413 if too large, 408 if too slow, 415 for another encoding.

    Raises OverloadedError when too much is being read.
    """
    encoding = check_encoding(request, *ENCODINGS)
    writer = request_scope(request.scope).writer
    whole = writer.take_body() if writer is not None else None
    if whole is not None:  # most bodies arrive with their head
        if len(whole) > limits.max_bytes:
            raise _too_large(limits)
        if not encoding:
            return whole
        limits.reading.num_bytes += len(whole)
        try:
            return await asyncio.to_thread(_unpacked, whole, encoding, limits)
        finally:
            limits.reading.num_bytes -= len(whole)
    chunks, size, reading = [], 0, limits.reading
    try:
        async with asyncio.timeout(limits.timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                reading.num_bytes += len(chunk)
                if size > limits.max_bytes:
                    raise _too_large(limits)
                _check_room(limits)
                chunks.append(chunk)
        body = b"".join(chunks)
        return await asyncio.to_thread(_unpacked, body, encoding, limits) if encoding else body
    except TimeoutError:
        raise HTTPException(408, f"the body was not complete after {limits.timeout_s:g} s", CLOSE) from None
    finally:
        reading.num_bytes -= size


async def read_fields(
    request: Request,
    limits: BodyLimits,
    model: type[Body],
    *,
    default: bytes = b"",
    given: Mapping[str, str] = NOT_GIVEN,
    ignores_unknown: bool = False,
) -> Body:
    """The body's fields; those of `default` if it is empty. Raises as `read_body` and `parse_body`."""
    raw = await read_body(request, limits)
    check = partial(parse_body, model=model, given=given, ignores_unknown=ignores_unknown)
    return await checked(raw or default, check, limits)


async def checked(raw: bytes, check: Callable[[bytes], Checked], limits: BodyLimits) -> Checked:
    """The result of `check` for a body, in a thread unless it is short. Raises as `check`, or OverloadedError."""
    if len(raw) <= SHORT_BYTES and Values.signs_in(raw).total <= SHORT_VALUES:
        return check(raw)
    limits.reading.num_bytes += len(raw)
    try:
        _check_room(limits)
        return await asyncio.get_running_loop().run_in_executor(_LARGE, check, raw)
    finally:
        limits.reading.num_bytes -= len(raw)


def _check_room(limits: BodyLimits) -> None:
    if limits.reading.num_bytes > MAX_LARGEST_BODIES * limits.max_bytes:
        raise OverloadedError("too much of other requests' bodies is being read: try again later")


def check_encoding(request: Request, *known: str) -> str:
    """Return the encoding of the body, one of `known`; "" for none. Raises HTTPException 415 for others."""
    if "content-encoding" not in fields_of(request.scope):
        return ""
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in known:
        remedy = f"send {' or '.join((*known, 'none'))}" if known else "send none"
        if known and encoding == "zstd":
            remedy = ZSTD_REMEDY
        message = f"content-encoding: {encoding[:50]!r} is not supported here: {remedy}"
        raise HTTPException(415, message, CLOSE | {"accept-encoding": ", ".join(known) or "identity"})
    return encoding


def _unpacked(body: bytes, encoding: str, limits: BodyLimits) -> bytes:
    """A decompressed body, up to the size limit."""
    kind = ENCODINGS[encoding]
    unpacking = kind.unpacker()
    try:
        unpacked = unpacking.decompress(body, limits.max_bytes + 1)
    except kind.error as error:
        raise InvalidRequestError(f"the body is no {encoding}, as content-encoding says: {error}") from None
    if len(unpacked) > limits.max_bytes:
        raise _too_large(limits)
    if not unpacking.eof or unpacking.unused_data:
        raise InvalidRequestError(f"the {encoding} body is not complete, or something follows it")
    return unpacked


def _too_large(limits: BodyLimits) -> HTTPException:
    return HTTPException(413, f"the body is larger than {limits.max_bytes} bytes", CLOSE)
