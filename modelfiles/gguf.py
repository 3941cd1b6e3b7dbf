"""The header of a GGUF file: metadata and tensor offsets. All values are checked against the file's size and fixed bounds.

"GGUF", version, two counts, metadata (key, kind, value), tensors (name, dimensions, kind, offset), padding, then the tensors.
"""

from __future__ import annotations

import math
import os
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf\Z")
_MAX_PARTS = 1000
_MAX_ENTRIES = 1 << 16  # metadata
_MAX_TENSORS = 1 << 20
_MAX_NAME_BYTES = 1 << 16
_MAX_VALUES = 1 << 24  # all arrays together
_MAX_ALIGNMENT = 1 << 16
_MAX_DIMENSIONS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
# Tensor types by number: name, elements a block, bytes a block.
KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip


class GgufError(ValueError):
    """The file can't be read as GGUF. The message names it."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The location of a tensor: row-major, little-endian, whole blocks a row."""

    name: str
    kind: str  # "Q4_K"
    shape: tuple[int, ...]  # rows first
    file: Path
    begin: int  # first byte in the file
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A model's header: the metadata of its first file, the tensors of all files."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    lengths: tuple[int, ...]  # bytes of each file's header

    @property
    def files(self) -> tuple[Path, ...]:
        return parts_of(self.file)


def is_gguf(model: Path) -> bool:
    """True if the file's name ends in .gguf."""
    return model.suffix.lower() == SUFFIX and not model.is_dir()


def parts_of(file: Path) -> tuple[Path, ...]:
    """All files of a model split as `…-00001-of-00003.gguf`; else the file itself."""
    found = _PART.match(file.name)
    if found is None or not 1 <= int(found[3]) <= _MAX_PARTS:
        return (file,)
    return tuple(file.with_name(f"{found[1]}-{part:05d}-of-{found[3]}{SUFFIX}") for part in range(1, int(found[3]) + 1))


def read_header(file: Path) -> GgufHeader:
    """Read the header of a model. Raises GgufError, naming the file, if it is truncated or malformed; OSError."""
    files = parts_of(file)
    if missing := [each.name for each in files if not each.is_file()]:
        raise GgufError(f"{file}: there is no {', '.join(missing[:3])} beside it: all parts of the model are needed")
    stamps = tuple((each, each.stat().st_size, each.stat().st_mtime_ns) for each in files)
    return _read(stamps)


def forget_headers() -> None:
    """Free what `read_header` keeps: each text of a vocabulary."""
    _read.cache_clear()


@lru_cache(maxsize=2)
def _read(stamps: tuple[tuple[Path, int, int], ...]) -> GgufHeader:
    parts = [_read_one(file) for file, _, _ in stamps]
    metadata = parts[0][0]
    told = metadata.get("split.count", 1) or 1
    if told != len(parts):
        raise GgufError(
            f"{stamps[0][0]} is one of {told} files: give their first one its name back, …-00001-of-{told:05d}{SUFFIX}"
        )
    tensors: dict[str, GgufTensor] = {}
    for number, (own, described, _) in enumerate(parts):
        if own.get("split.no", number) != number:
            raise GgufError(f"{stamps[number][0]} says that it is part {own['split.no']!r}, counted from 0")
        for tensor in described:
            if tensor.name in tensors:
                raise GgufError(f"{tensor.file}: {tensor.name} is there twice")
            tensors[tensor.name] = tensor
    return GgufHeader(stamps[0][0], metadata, tensors, tuple(length for _, _, length in parts))


def _read_one(file: Path) -> tuple[dict[str, Any], list[GgufTensor], int]:
    """Read one file's metadata, tensors and header size."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        try:
            return _Reader(opened, size).header(file)
        except (_MalformedError, struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise GgufError(f"{file} can't be read as GGUF: {error}: is the download complete?") from error


class _MalformedError(ValueError):
    """The file does not follow the GGUF format."""


class _Reader:
    """A sequential reader that never reads past the end of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self._at, self._values = file, size, 0, 0

    def header(self, file: Path) -> tuple[dict[str, Any], list[GgufTensor], int]:
        if self._bytes(4) != _MAGIC:
            raise _MalformedError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            what = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise _MalformedError(f"it is {what}; versions 2 and 3, little-endian, can be read")
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
            raise _MalformedError(f"{num_tensors} tensors and {num_entries} entries are more than any model has")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string(_MAX_NAME_BYTES)
            if key in metadata:
                raise _MalformedError(f"{key!r:.80} is there twice")
            metadata[key] = self._value(self._scalar("I"), key)
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise _MalformedError(
                f"general.alignment = {alignment!r:.40} is no power of two from 8 to {_MAX_ALIGNMENT}"
            )
        length = self._at
        begin = -(-length // alignment) * alignment
        tensors = [_placed(file, one, begin, alignment, self._size) for one in described]
        _check_apart(tensors)
        return metadata, tensors, length

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise _MalformedError(f"{count} bytes at {self._at} are more than the file of {self._size} has")
        read = self._file.read(count)
        if len(read) != count:
            raise _MalformedError("it has become shorter")
        self._at += count
        return read

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _string(self, most: int | None = None) -> str:
        length = self._scalar("Q")
        if most is not None and not 0 < length <= most:
            raise _MalformedError(f"a name of {length} bytes at {self._at}")
        return self._bytes(length).decode("utf-8")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise _MalformedError(f"{key!r:.80} is of the unknown kind {kind}")
        value = self._scalar(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def _array(self, key: str) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        self._values += count
        if self._values > _MAX_VALUES:
            raise _MalformedError(f"{key!r:.80} makes more than {_MAX_VALUES} values")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:  # arrays of arrays are refused, too: no model has any
            raise _MalformedError(f"{key!r:.80} holds values of the unknown kind {kind}")
        values = array(_SCALARS[kind])
        values.frombytes(self._bytes(count * struct.calcsize(f"<{_SCALARS[kind]}")))
        return [bool(value) for value in values] if kind == _BOOL else values.tolist()

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape, kind and offset."""
        name = self._string(_MAX_NAME_BYTES)
        count = self._scalar("I")
        if not 1 <= count <= _MAX_DIMENSIONS:
            raise _MalformedError(f"{name!r:.80} has {count} dimensions")
        dimensions = [self._scalar("Q") for _ in range(count)]
        number, offset = self._scalar("I"), self._scalar("Q")
        if number not in KINDS:
            raise _MalformedError(f"{name!r:.80} is of the unknown kind {number}; this release knows {_known()}")
        kind, elements, block = KINDS[number]
        if any(not 1 <= length < 1 << 40 for length in dimensions):
            raise _MalformedError(f"{name!r:.80} has the dimensions {dimensions}")
        if dimensions[0] % elements:
            raise _MalformedError(f"{name!r:.80} has rows of {dimensions[0]}, which are no whole blocks of {kind}")
        return name, kind, tuple(reversed(dimensions)), math.prod(dimensions) // elements * block, offset


def _known() -> str:
    return ", ".join(name for name, _, _ in KINDS.values())


def _placed(
    file: Path, described: tuple[str, str, tuple[int, ...], int, int], begin: int, alignment: int, size: int
) -> GgufTensor:
    name, kind, shape, length, offset = described
    if offset % alignment or begin + offset + length > size:
        raise _MalformedError(f"{name!r:.80} lies at {offset} and takes {length} bytes; the file has {size}")
    return GgufTensor(name, kind, shape, file, begin + offset, begin + offset + length)


def _check_apart(tensors: list[GgufTensor]) -> None:
    """Refuse overlapping tensors."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            raise _MalformedError(f"{tensor.name!r:.80} begins within {before!r:.80}")
        end, before = tensor.end, tensor.name
