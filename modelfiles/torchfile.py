"""Tensors of a small file as torch.save writes a state_dict: the instructions of its description are read, and none is run.

Only those that make a dictionary of tensors are known; any other one is refused by its name.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BYTES, MAX_DESCRIPTION_BYTES, MAX_RECORDS = 64 << 20, 1 << 16, 256
# Storages of numbers: safetensors' name of the dtype, and a number's bytes.
_STORAGES = {"torch FloatStorage": ("F32", 4), "torch HalfStorage": ("F16", 2), "torch BFloat16Storage": ("BF16", 2)}
_DICT, _TENSOR = "collections OrderedDict", "torch._utils _rebuild_tensor_v2"


class TorchFileError(ValueError):
    """A file that is no plain dictionary of tensors; the message names it."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor's numbers, contiguous and little-endian. `dtype`: F32, F16 or BF16."""

    dtype: str
    shape: tuple[int, ...]
    values: bytes


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class _Described:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]


_MARK = object()


def read_torch_file(file: Path) -> dict[str, FileTensor]:
    """The tensors by name. Raises TorchFileError, OSError."""
    if (size := file.stat().st_size) > MAX_BYTES:
        raise TorchFileError(f"{file} has {size} bytes: at most {MAX_BYTES} are read of such a file")
    try:
        with zipfile.ZipFile(file) as opened:
            records = opened.infolist()
            # A compressed record may be larger than the file.
            if len(records) > MAX_RECORDS or any(one.compress_type or one.file_size > size for one in records):
                raise TorchFileError(f"{file} is not as torch.save writes it: its records are compressed or too many")
            named = {one.filename.partition("/")[2]: one for one in records}
            if "data.pkl" not in named or named["data.pkl"].file_size > MAX_DESCRIPTION_BYTES:
                raise TorchFileError(
                    f"{file} has no description of tensors, or one of over {MAX_DESCRIPTION_BYTES} bytes"
                )
            if "byteorder" in named and opened.read(named["byteorder"]) != b"little":
                raise TorchFileError(f"{file} was written with another order of bytes")
            found = _described(opened.read(named["data.pkl"]), file)
            return {name: _read(one, opened, named, file) for name, one in found.items()}
    except zipfile.BadZipFile as error:
        raise TorchFileError(f"{file} is not as torch.save writes it since 1.6: {error}") from None


def _read(one: _Described, opened: zipfile.ZipFile, named: dict[str, zipfile.ZipInfo], file: Path) -> FileTensor:
    dtype, each = _STORAGES[one.storage.kind]
    record = named.get(f"data/{one.storage.key}")
    begin, end = each * one.offset, each * (one.offset + math.prod(one.shape))
    if record is None or end > record.file_size:
        raise TorchFileError(f"{file}: a tensor's numbers are missing")
    return FileTensor(dtype, one.shape, opened.read(record)[begin:end])


def _described(description: bytes, file: Path) -> dict[str, _Described]:
    """Raises TorchFileError for what describes anything else than tensors by name."""
    try:
        found = _followed(description)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise TorchFileError(f"{file} is no plain dictionary of tensors: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise TorchFileError(f"{file} is no plain dictionary of tensors")
    tensors = {name: one for name, one in found.items() if isinstance(one, _Described)}
    if len(tensors) < len(found):
        raise TorchFileError(f"{file} is no plain dictionary of tensors: it holds something else, too")
    return tensors


def _followed(description: bytes) -> Any:
    """The value that the instructions make. Raises ValueError for an unknown one, or LookupError, TypeError."""
    stack, kept = list[Any](), dict[Any, Any]()
    for code, argument, _ in pickletools.genops(description):
        if code.name == "STOP":
            return stack.pop()
        if code.name == "BINPUT" or code.name == "LONG_BINPUT":
            kept[argument] = stack[-1]
        elif code.name == "BINGET" or code.name == "LONG_BINGET":
            stack.append(kept[argument])
        elif code.name in _PUSHED:
            stack.append(_PUSHED[code.name](argument))
        elif code.name in _DONE:
            _DONE[code.name](stack)
        elif code.name != "PROTO":
            raise ValueError(f"the instruction {code.name} makes no tensor")
    raise ValueError("its description has no end")


def _known(name: str) -> _Global:
    if name not in (_DICT, _TENSOR, *_STORAGES):
        raise ValueError(f"{name.replace(' ', '.'):.80} makes no tensor")
    return _Global(name)


def _since_mark(stack: list[Any]) -> list[Any]:
    items = list[Any]()
    while (one := stack.pop()) is not _MARK:
        items.append(one)
    return items[::-1]


def _last(stack: list[Any], count: int) -> list[Any]:
    return [stack.pop() for _ in range(count)][::-1]


def _set(stack: list[Any], items: list[Any]) -> None:
    _dict_of(stack[-1]).update(zip(items[::2], items[1::2], strict=True))


def _dict_of(one: Any) -> dict[Any, Any]:
    if not isinstance(one, dict):
        raise TypeError("a value of no dictionary")
    return one


def _reduce(stack: list[Any]) -> None:
    what, arguments = _last(stack, 2)
    stack.append(_made(what, arguments))


def _storage(said: Any) -> _Storage:
    kind, of, key, *_ = said
    if kind != "storage" or not isinstance(of, _Global) or of.name not in _STORAGES:
        raise ValueError("a storage of other numbers than float32, float16 and bfloat16")
    return _Storage(of.name, str(key))


def _made(what: Any, arguments: Any) -> Any:
    if what == _Global(_DICT) and arguments == ():
        return dict[Any, Any]()
    if what != _Global(_TENSOR):
        raise ValueError("a call of something else than a tensor's maker")
    storage, offset, shape, stride, *_ = arguments
    numbers = [offset, *shape]
    if not isinstance(storage, _Storage) or not all(isinstance(one, int) and 0 <= one < 1 << 32 for one in numbers):
        raise ValueError("a tensor of an impossible shape")
    contiguous = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    if any(size > 1 and own != wanted for size, own, wanted in zip(shape, stride, contiguous, strict=True)):
        raise ValueError("a tensor whose numbers are not contiguous")
    return _Described(storage, offset, tuple(shape))


# Instructions of protocol 2, which torch.save writes: those that push a value, and those that use the stack.
_PUSHED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"), lambda given: given),
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "NONE": lambda _: None,
    "MARK": lambda _: _MARK,
    "EMPTY_DICT": lambda _: dict[Any, Any](),
    "EMPTY_TUPLE": lambda _: (),
    "GLOBAL": lambda name: _known(str(name)),
}
_DONE: dict[str, Callable[[list[Any]], None]] = {
    "TUPLE": lambda stack: stack.append(tuple(_since_mark(stack))),
    "TUPLE1": lambda stack: stack.append(tuple(_last(stack, 1))),
    "TUPLE2": lambda stack: stack.append(tuple(_last(stack, 2))),
    "TUPLE3": lambda stack: stack.append(tuple(_last(stack, 3))),
    "SETITEM": lambda stack: _set(stack, _last(stack, 2)),
    "SETITEMS": lambda stack: _set(stack, _since_mark(stack)),
    "BINPERSID": lambda stack: stack.append(_storage(stack.pop())),
    "REDUCE": _reduce,
    "BUILD": lambda stack: _last(stack, 1).clear(),  # versions of modules
}
