"""Tensors of the Open Inference Protocol: named values of one datatype, as JSON or as bytes. No I/O."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

BYTES = "BYTES"
BOOL = "BOOL"
MAX_ELEMENTS = 1_024  # texts, booleans and numbers of one input
_LENGTH = struct.Struct("<I")  # before each element of raw BYTES
_FORMATS = {
    BOOL: "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i",
    "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
DATATYPES = (BYTES, *_FORMATS)


@dataclass(frozen=True, slots=True)
class Tensor:
    """Values in one dimension: texts, booleans or numbers."""

    name: str
    datatype: str
    values: Sequence[Any]

    @property
    def shape(self) -> list[int]:
        return [len(self.values)]

    @property
    def raw(self) -> bytes:
        """The values as bytes, little-endian; texts are length-prefixed."""
        if self.datatype == BYTES:
            texts = [text.encode("utf-8", "replace") for text in self.values]
            return b"".join(_LENGTH.pack(len(text)) + text for text in texts)
        return struct.pack(f"<{len(self.values)}{_FORMATS[self.datatype]}", *self.values)


def num_elements(shape: Sequence[int]) -> int:
    """Number of values of a shape. Raises ValueError."""
    if any(size < 0 for size in shape):
        raise ValueError("shape: sizes are not negative in a request")
    if (count := math.prod(shape)) > MAX_ELEMENTS:
        raise ValueError(f"shape: at most {MAX_ELEMENTS} elements are allowed")
    return count


def values_of(datatype: str, shape: Sequence[int], data: Any) -> list[Any]:
    """The values of an input's JSON data, nested or not. Raises ValueError."""
    count, values = num_elements(shape), list[Any]()
    _flatten(data, values, len(shape) + 1)
    if len(values) != count:
        raise ValueError(f"data: has {len(values)} elements, and the shape {list(shape)} says {count}")
    is_one = _CHECKS.get(datatype, _is_number)
    if not all(map(is_one, values)):
        raise ValueError(f"data: has an element that is not of datatype {datatype}")
    return values


def values_of_raw(datatype: str, shape: Sequence[int], raw: bytes) -> list[Any]:
    """Decode an input's raw bytes. Raises ValueError."""
    count = num_elements(shape)
    if datatype == BYTES:
        return _texts_of_raw(raw, count)
    if datatype not in _FORMATS:
        raise ValueError(_unknown(datatype))
    form = f"<{count}{_FORMATS[datatype]}"
    if len(raw) != struct.calcsize(form):
        raise ValueError(f"data: has {len(raw)} bytes, and {count} of {datatype} have {struct.calcsize(form)}")
    return list(struct.unpack(form, raw))


def check_datatype(datatype: str) -> str:
    """Check a datatype. Raises ValueError for an unsupported one."""
    if datatype not in DATATYPES:
        raise ValueError(_unknown(datatype))
    return datatype


def _unknown(datatype: str) -> str:
    return f"datatype: {datatype[:20]!r} is not read here: send one of {', '.join(DATATYPES)}"


def _flatten(data: Any, values: list[Any], depth: int) -> None:
    if not isinstance(data, list):
        values.append(data)
        return
    if not depth:
        raise ValueError("data: is nested deeper than the shape says")
    for one in data:
        _flatten(one, values, depth - 1)


def _texts_of_raw(raw: bytes, count: int) -> list[str]:
    texts, at = list[str](), 0
    while at < len(raw) and len(texts) <= count:
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(raw, at)[0] if begin <= len(raw) else len(raw) + 1
        if at > len(raw):
            raise ValueError(
                "data: ends within an element of BYTES: each is a 4-byte little-endian length and so many bytes"
            )
        texts.append(text_of(raw[begin:at]))
    if len(texts) != count:
        raise ValueError(
            f"data: has {'more' if len(texts) > count else len(texts)} elements, and the shape says {count}"
        )
    return texts


def text_of(element: bytes) -> str:
    """Decode an element of BYTES as text. Raises ValueError."""
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise ValueError("data: an element of BYTES is not UTF-8") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    BYTES: lambda value: isinstance(value, str),
    BOOL: lambda value: isinstance(value, bool),
}
