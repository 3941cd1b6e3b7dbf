"""Storage encodings of numbers: plain floats, and GGUF's blocks, which are decoded to floats as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.checkpoint.safetensors import CheckpointError, StoredTensor, described_by
from engine.kernels.quantised.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS, DECODERS, decoded

# safetensors dtypes. Integers, and 8-bit floats that a format asks for, are copied unchanged.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_COMPUTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 16  # tensors are split at multiples of it, never within an element


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding in whole blocks of elements."""

    elements: int  # elements of a block
    size: int  # bytes of a block
    decode: Callable[[torch.Tensor], torch.Tensor]  # bytes of blocks, aligned -> their values in order
    dtype: torch.dtype | None = None  # the bytes are such values

    @property
    def unit(self) -> int:
        """Bytes of an indivisible unit."""
        return math.lcm(self.size, _ALIGNMENT)

    def bytes_of(self, elements: int) -> int:
        """Bytes of so many elements. Raises ValueError for a part of a block."""
        blocks, rest = divmod(elements, self.elements)
        if rest:
            raise ValueError(f"{elements} elements are no whole blocks of {self.elements}")
        return blocks * self.size

    def part(self, start: int, count: int) -> tuple[int, Encoding]:
        """The first byte of some elements, which may begin or end within blocks, and the encoding in which they are one block."""
        first, end = start // self.elements, -(-(start + count) // self.elements)
        skipped = start - first * self.elements
        if not skipped and not count % self.elements:
            return first * self.size, self

        def decode(data: torch.Tensor) -> torch.Tensor:
            return self.decode(data)[skipped : skipped + count]

        return first * self.size, Encoding(count, (end - first) * self.size, decode)

    def elements_of(self, size: int) -> int:
        return size // self.size * self.elements


def as_wanted(stored: StoredTensor, wanted: torch.dtype) -> StoredTensor:
    """The tensor itself, or its raw bytes for a format that decodes GGUF's blocks itself."""
    if wanted is not torch.uint8 or stored.dtype not in DECODERS:
        return stored
    length = stored.shape[-1] // BLOCK_ELEMENTS[stored.dtype] * BLOCK_BYTES[stored.dtype]
    return replace(stored, dtype="U8", shape=(*stored.shape[:-1], length), columns=None)


def is_decoded(stored: StoredTensor, wanted: torch.dtype) -> bool:
    """True if blocks are decoded to floats as they are read."""
    return stored.dtype in DECODERS and wanted in _COMPUTED


def encoding_of(stored: StoredTensor, wanted: torch.dtype) -> Encoding:
    """The encoding of a tensor that is, or is converted to, the wanted dtype. Raises CheckpointError."""
    if is_decoded(stored, wanted):
        return Encoding(BLOCK_ELEMENTS[stored.dtype], BLOCK_BYTES[stored.dtype], partial(_values, stored.dtype))
    dtype = _DTYPES.get(stored.dtype)
    if dtype is None and stored.dtype in BLOCK_BYTES:
        raise CheckpointError(
            f"{stored.name} holds {stored.dtype}, which is not supported: take a file of Q4_K_M or Q8_0"
        )
    if dtype is None:
        raise CheckpointError(f"{stored.name} holds {stored.dtype}, which is not supported")
    if wanted is dtype or (wanted in _COMPUTED and dtype.is_floating_point):
        return Encoding(1, dtype.itemsize, lambda data: data.view(dtype), dtype)
    described = described_by(stored.file, "quantization_config")
    if wanted in _COMPUTED:
        raise CheckpointError(
            f"{stored.name} holds {stored.dtype}: quantised weights that {described} doesn't describe"
        )
    raise CheckpointError(
        f"{stored.name} holds {stored.dtype}, {described} asks for {str(wanted).removeprefix('torch.')}"
    )


def _values(kind: str, data: torch.Tensor) -> torch.Tensor:
    return decoded(kind, data).values().flatten()
