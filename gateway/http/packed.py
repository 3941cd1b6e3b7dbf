"""Packed bodies: unpacked as far as a body may be large. gzip, and zstd where its library is installed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from common.errors import InvalidRequestError

MAX_WINDOW_LOG = 23  # 8 MiB, as RFC 9659 has it: what a frame may make its reader hold
ZSTD_MODULES = ("compression.zstd", "backports.zstd")  # Python 3.14's, and the same for older ones
ZSTD_REMEDY = "install backports.zstd beside the gateway, or send gzip or none"


class TooLargeError(Exception):
    """Unpacked, the body is larger than it may be."""


class Unpacker(Protocol):
    """One body's, as zlib and zstd have it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class Encoding(NamedTuple):
    """How to unpack one body, and what the library raises for a wrong one."""

    unpacker: Callable[[], Unpacker]
    error: type[Exception]


def _found() -> dict[str, Encoding]:
    """The encodings that can be read here, by their names in `content-encoding`."""
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


def unpacked(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The whole body. Raises TooLargeError, and InvalidRequestError for one that isn't packed so, or not whole."""
    kind = ENCODINGS[encoding]
    unpacking = kind.unpacker()
    try:
        found = unpacking.decompress(body, max_bytes + 1)
    except kind.error as error:
        raise InvalidRequestError(f"the body is no {encoding}, as content-encoding says: {error}") from None
    if len(found) > max_bytes:
        raise TooLargeError
    if not unpacking.eof or unpacking.unused_data:
        raise InvalidRequestError(f"the {encoding} body is not complete, or something follows it")
    return found
