"""A checkpoint's safetensors files with validated headers.

A file is 8 bytes of header length, the header (JSON: name -> dtype, shape, byte range), then the bytes without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelfiles.gguf import is_gguf

INDEX_FILE = "model.safetensors.index.json"
SAMPLE_BYTES = 64  # fine-tunes of one base differ only in their values
_MAX_HEADER_BYTES = 100_000_000  # the format's limit
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64, "BF16": 16, "BOOL": 8}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F16": 16, "F32": 32, "F64": 64}
_BITS |= {f"{sign}{bits}": bits for sign in "IU" for bits in (8, 16, 32, 64)}


class CheckpointError(ValueError):
    """A model's weights don't fit what its config.json or GGUF metadata says, or can't be read."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor: row-major, little-endian."""

    name: str
    dtype: str  # the format's name: "BF16"
    shape: tuple[int, ...]
    file: Path
    begin: int  # first byte in the file
    end: int
    # GGUF only: a permutation into the file's order of elements, and the inverse of the converter's change to values.
    order: Callable[[Any], Any] | None = None
    undo: Callable[[Any], Any] | None = None
    # The file interleaves groups within a row; ours is (groups, heads of a group, size of a head).
    columns: tuple[int, int, int] | None = None


def described_by(model: Path, field: str = "") -> str:
    """The file that describes the tensors of a folder, or of a GGUF file."""
    if is_gguf(model):
        return "the GGUF metadata"
    return f"{field} in config.json" if field else "config.json"


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files, sorted. Raises CheckpointError when none exist or some are missing."""
    index, single = folder / INDEX_FILE, folder / "model.safetensors"
    if index.is_file():
        files = sorted(folder / name for name in _indexed_names(index))
    elif single.is_file():  # only this file: some folders repeat the same weights under other names
        files = [single]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{folder}: {INDEX_FILE} names files that are not there: {some(missing)}")
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} holds pickled weights only, which can run code when loaded: convert them to safetensors "
            "(model.save_pretrained(folder, safe_serialization=True) of transformers) or download the safetensors files"
        )
    raise CheckpointError(f"{folder} holds no *.safetensors files")


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Yield every tensor of the checkpoint, in the files' order. Raises CheckpointError, naming the file."""
    for file in weight_files(folder):
        try:
            yield from _tensors(file)
        except (_MalformedError, OSError, RecursionError) as error:
            raise CheckpointError(f"{file} can't be read as safetensors: {error}") from error


def characteristic_bytes(file: Path) -> Iterator[bytes]:
    """The file's size, its header, and some bytes from the middle of each tensor."""
    with file.open("rb") as opened:
        size = file.stat().st_size
        yield struct.pack("<Q", size)
        prefix = opened.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{file} is not a safetensors file, or truncated")
        header = opened.read(header_bytes)
        yield header
        for start, end in _ranges(file, header):
            opened.seek(8 + header_bytes + max(start, (start + end - SAMPLE_BYTES) // 2))
            yield opened.read(min(end - start, SAMPLE_BYTES))


def some(names: list[str], most: int = 5) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _indexed_names(index: Path) -> set[str]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
    if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise CheckpointError(f"{index} names files outside its folder: {outside}")
    return names


class _MalformedError(ValueError):
    """The file does not follow the format."""


def _tensors(file: Path) -> list[StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise _MalformedError(
                f"a header of {header_bytes} bytes is more than the file of {size} or the format allows"
            )
        header = opened.read(header_bytes)
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except ValueError as error:
        raise _MalformedError(f"the header is no JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _MalformedError("the header is no JSON object")
    entries.pop("__metadata__", None)
    data = 8 + header_bytes
    tensors = sorted(
        (_tensor(file, name, entry, data) for name, entry in entries.items()), key=lambda t: (t.begin, t.end)
    )
    _check_gapless(tensors, data, size)
    return tensors


def _tensor(file: Path, name: str, entry: Any, data: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _MalformedError(f"{name} is described by other fields than dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _MalformedError(f"{name} has the unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _MalformedError(f"{name} has shape {shape!r} and data_offsets {offsets!r}")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise _MalformedError(f"{name} of {dtype} {shape} does not take {end - begin} bytes")
    return StoredTensor(name, dtype, tuple(shape), file, data + begin, data + end)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_gapless(tensors: list[StoredTensor], data: int, size: int) -> None:
    end = data
    for tensor in tensors:
        if tensor.begin != end:
            raise _MalformedError(f"{tensor.name} begins at byte {tensor.begin}, the tensor before it ends at {end}")
        end = tensor.end
    if end != size:
        raise _MalformedError(f"the header describes {end} bytes, the file has {size}: is it truncated?")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _ranges(file: Path, header: bytes) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header)
        offsets = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        if not all(_naturals(each) and len(each) == 2 and each[0] <= each[1] for each in offsets):
            raise ValueError("data_offsets")
        return sorted((begin, end) for begin, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} has no valid safetensors header: {error!r}") from error
