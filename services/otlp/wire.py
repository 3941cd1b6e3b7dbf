"""Spans as bytes: `ExportTraceServiceRequest` of OTLP 1.x, in Protocol Buffers.

Written out by hand: most of what OpenTelemetry's SDK spends on a span are objects between ours and these bytes
(docs/observability.md has the figures). What repeats from span to span (names of attributes, workers, a request's id) is kept
encoded. A test reads it all back with OpenTelemetry's classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache

from common.tracing import Attributes, Span, Value

KEPT = 4096  # attributes that stay encoded
# Of each field its number and how it is written: number << 3 | (0 varint, 1 eight bytes, 2 bytes with their length).
_KINDS = {"internal": b"\x30\x01", "server": b"\x30\x02", "consumer": b"\x30\x05"}
_STATUS_ERROR = b"\x18\x02"
_time = struct.Struct("<Q").pack
_double = struct.Struct("<d").pack


def resource_of(attributes: Mapping[str, str]) -> bytes:
    """Whose spans they are, for `export_request`."""
    return _sized(b"\x0a", b"".join(_sized(b"\x0a", _attribute(*item)) for item in attributes.items()))


def export_request(resource: bytes, spans: Iterable[Span], *, offset_ns: int) -> bytes:
    """One request with all `spans`. `offset_ns` makes their instants unix time."""
    scope = _sized(b"\x0a", _sized(b"\x0a", b"baton"))
    body = scope + b"".join(_sized(b"\x12", _span(span, offset_ns)) for span in spans)
    return _sized(b"\x0a", resource + _sized(b"\x12", body))


def _span(span: Span, offset_ns: int) -> bytes:
    context = span.context
    parts = [
        b"\x0a\x10" + bytes.fromhex(context[3:35]) + b"\x12\x08" + bytes.fromhex(context[36:52]),
        _text(b"\x2a", span.name),
        _KINDS[span.kind],
        b"\x39" + _time(int(span.began_at * 1e9) + offset_ns),
        b"\x41" + _time(int(span.ended_at * 1e9) + offset_ns),
    ]
    if span.parent:
        parts.append(b"\x22\x08" + bytes.fromhex(span.parent[36:52]))
    parts += _attributes(b"\x4a", span.attributes)
    for event in span.events:
        told = [b"\x09" + _time(int(event.at * 1e9) + offset_ns), _text(b"\x12", event.name)]
        parts.append(_sized(b"\x5a", b"".join(told + _attributes(b"\x1a", event.attributes))))
    for link in span.links:
        parts.append(b"\x6a\x1c\x0a\x10" + bytes.fromhex(link[3:35]) + b"\x12\x08" + bytes.fromhex(link[36:52]))
    if span.error:
        parts.append(_sized(b"\x7a", _text(b"\x12", span.error) + _STATUS_ERROR))
    return b"".join(parts)


def _attributes(tag: bytes, attributes: Attributes) -> list[bytes]:
    encoded = []
    for name, value in attributes.items():
        # A time is hardly ever the same twice, and a list is no key of a cache.
        pair = _attribute(name, value) if isinstance(value, float | list) else _kept_attribute(name, value)
        encoded.append(_sized(tag, pair))
    return encoded


def _attribute(name: str, value: Value) -> bytes:
    return _name(name) + _sized(b"\x12", _value(value))


_kept_attribute = lru_cache(KEPT, typed=True)(_attribute)  # typed: True is not 1


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _text(b"\x0a", value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    if isinstance(value, float):
        return b"\x21" + _double(value)
    return _sized(b"\x2a", b"".join(_sized(b"\x0a", _value(item)) for item in value))


@lru_cache(KEPT)
def _name(name: str) -> bytes:
    return _text(b"\x0a", name)


def _text(tag: bytes, text: str) -> bytes:
    return _sized(tag, text.encode("utf-8", "replace"))  # half a surrogate is no reason to lose a batch


def _sized(tag: bytes, body: bytes) -> bytes:
    size = len(body)
    return tag + (_SMALL[size] if size < len(_SMALL) else _varint(size)) + body


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SMALL = [_varint(number) for number in range(2048)]
