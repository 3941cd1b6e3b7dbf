"""`quant_method` bitsandbytes: tensors beside each module describe its quantisation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.checkpoint.safetensors import StoredTensor, stored_tensors
from engine.families.reading.fields import Fields
from engine.formats.codebook import Codebook4, Module4
from engine.formats.packed import RowsOfBytes
from engine.formats.product import Format
from engine.formats.quantization import Modules, Quantization
from engine.spec.model import UnsupportedModelError

# Placeholder for config.json's word; block sizes and tables are in the checkpoint's files (`in_files`).
ASKED = Quantization(name="bitsandbytes")
# Fields that affect quantising or other runtimes, not inference here.
_HARMLESS = """
llm_int8_skip_modules llm_int8_threshold llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight bnb_4bit_compute_dtype
bnb_4bit_quant_type bnb_4bit_use_double_quant
"""
_STATE = ".weight.quant_state.bitsandbytes__"
_MOST_BYTES = 4096
_BLOCKS = tuple(1 << power for power in range(4, 15))


def read(fields: Fields) -> Quantization:
    for name in ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"):
        fields.only(name, True, False)
    fields.only("bnb_4bit_quant_storage", "uint8")
    fields.ignore(*_HARMLESS.split())
    return ASKED


def in_files(folder: Path) -> Quantization:
    """Read the files' description of each module. Raises UnsupportedModelError, naming the tensor, and CheckpointError."""
    modules, sizes, rows = dict[str, Module4](), dict[tuple[str, int, int], set[str]](), set[str]()
    for stored in stored_tensors(folder):
        module, state, kind = stored.name.rpartition(_STATE)
        if state:
            block, scales_block, modules[module] = _module(stored, module)
            sizes.setdefault((kind, block, scales_block), set()).add(module)
        elif stored.name.endswith(".SCB"):
            rows.add(stored.name.removesuffix(".SCB"))
        elif stored.name.endswith(".weight_format") and _bytes(stored) != b"\0":
            raise UnsupportedModelError(f"{stored.name}: only rows (0) are supported; store the model anew")
    return Quantization(name=ASKED.name, groups=tuple(_groups(sizes, modules, rows)))


def _groups(
    sizes: dict[tuple[str, int, int], set[str]], modules: dict[str, Module4], rows: set[str]
) -> Iterator[tuple[Modules, Format]]:
    for (kind, block, scales_block), named in sizes.items():
        format = Codebook4(kind=kind, block=block, scales_block=scales_block, modules=modules)
        yield Modules(named=frozenset(named)), format
    if rows:
        yield Modules(named=frozenset(rows)), RowsOfBytes()


def _module(stored: StoredTensor, name: str) -> tuple[int, int, Module4]:
    """Codes in a block, scales in a block (0: they are floats), and the module's own values."""
    try:
        said: dict[str, Any] = json.loads(_bytes(stored))
        shape = said["shape"]
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)):
            raise ValueError(f"shape = {shape!r:.40}")
        if said["blocksize"] not in _BLOCKS or said.get("nested_blocksize", 16) not in _BLOCKS:
            raise ValueError("blocksize and nested_blocksize must be powers of 2 from 16 to 16384")
        if said.get("nested_dtype", "float32") != "float32":
            raise ValueError("nested_dtype must be float32")
        mean = float(said.get("nested_offset", 0.0))
        if not math.isfinite(mean):
            raise ValueError(f"nested_offset = {mean}")
        return int(said["blocksize"]), int(said.get("nested_blocksize", 0)), Module4(name, (shape[0], shape[1]), mean)
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise UnsupportedModelError(f"{stored.name} can't be read: {error}") from error


def _bytes(stored: StoredTensor) -> bytes:
    if stored.dtype != "U8" or stored.end - stored.begin > _MOST_BYTES:
        raise UnsupportedModelError(f"{stored.name} must be at most {_MOST_BYTES} bytes (U8)")
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        return file.read(stored.end - stored.begin)
