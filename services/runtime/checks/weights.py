"""A model's weights as described by their files' headers: completeness, parameters, dtypes."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelfiles.gguf import KINDS, is_gguf, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER = 100 << 20  # bytes; safetensors' own bound
FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
BYTES_OF_CODES = {name: size / elements for name, elements, size in KINDS.values()}
BYTES_OF_CODES |= {"F4": 0.5} | {f"{sign}{bits}": bits / 8 for sign in "IU" for bits in (8, 16, 32, 64)}
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Weights:
    """The elements of a model's weights, by its files' headers."""

    num_files: int
    num_bytes: int
    elements: Mapping[str, int]  # by the format's name: "BF16", "Q4_K"
    problems: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Number of parameters; 0 if packed formats hide it."""
        packed = any(name[0] in "IU" and name[1:].isdigit() for name in self.elements)
        return 0 if packed else sum(self.elements.values())

    def bytes_of_codes(self, kind: str) -> int:
        """Stored bytes of a dtype's elements."""
        return int(self.elements[kind] * BYTES_OF_CODES.get(kind, 1))

    @property
    def mostly(self) -> str:
        """The dtype of most elements."""
        return max(self.elements, key=lambda name: self.elements[name], default="nothing")


def weights_of(model: Path) -> Weights:
    """Read the headers of all weights. Raises GgufError and OSError for a GGUF file; a folder's problems are in the result."""
    if is_gguf(model):
        return _in_gguf(model)
    try:
        files = weight_files(model)
    except IndexFileError as error:
        return Weights(0, 0, {}, (f"{INDEX} can't be read ({error})",))
    if not files:
        return Weights(0, 0, {}, (_none_in(model),))
    elements: Counter[str] = Counter()
    size, problems = 0, []
    for file in files:
        try:
            size += file.stat().st_size
            elements.update(dict(_elements(file)))
        except OSError:
            problems.append(f"{file.name} is missing")
        except _BrokenError as error:
            problems.append(f"{file.name} {error}")
    return Weights(len(files), size, elements, tuple(problems))


def _in_gguf(model: Path) -> Weights:
    header = read_header(model)
    elements: Counter[str] = Counter()
    for tensor in header.tensors.values():
        elements[tensor.kind] += math.prod(tensor.shape)
    return Weights(len(header.files), sum(file.stat().st_size for file in header.files), elements)


class IndexFileError(ValueError):
    """The index of a folder's weights can't be read."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the engine would load, also those that an index names and that are missing.

    Raises IndexFileError.
    """
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise IndexFileError(type(error).__name__) from None
    return [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))


def _none_in(folder: Path) -> str:
    if any(next(folder.glob(pattern), None) for pattern in PICKLED):
        return f"{folder} holds pickled weights only, which can run code when loaded"
    return f"no .safetensors in {folder}"


class _BrokenError(ValueError):
    """A fault of a weights file."""


def _elements(file: Path) -> Iterator[tuple[str, int]]:
    """Elements of each dtype in a safetensors file, whose header tells its length. Raises _BrokenError, OSError."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(MAX_HEADER, size):
                raise ValueError("no header")
            header: dict[str, Any] = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        counts: Counter[str] = Counter()
        for entry in header.values():
            counts[str(entry["dtype"])] += math.prod(entry["shape"])
        whole = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError):
        raise _BrokenError("has no valid header") from None
    if size != whole:
        raise _BrokenError(f"has {size} bytes of {whole}")
    yield from counts.items()
