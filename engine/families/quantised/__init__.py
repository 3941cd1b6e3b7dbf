"""A checkpoint's quantisation, and that of `--quantization`. One module for each `quant_method`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.gguf_names import stored_in_gguf
from engine.checkpoint.safetensors import CheckpointError, stored_tensors
from engine.families.quantised import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)
from engine.families.quantised.fields import check_letters
from engine.families.reading.fields import Fields
from engine.formats.dense import DENSE, PLAIN_TABLES, HalvesTables, PlainModules
from engine.formats.fp8 import FP8_WHILE_LOADING
from engine.formats.grouped import takes_tiles
from engine.formats.int4 import INT4_WHILE_LOADING
from engine.formats.int8 import INT8_TABLES, INT8_WHILE_LOADING
from engine.formats.packed import Awq, Gptq, PackedRows, RowsOfBytes, SignedBytes
from engine.formats.product import Format
from engine.formats.quantization import EVERY, UNQUANTISED, Modules, Quantization
from engine.formats.tiled import TiledTables
from engine.kernels.device import use_triton
from engine.kernels.linear import computes_in_bfloat16
from engine.kernels.native import halves
from engine.spec.mla import MLASpec
from engine.spec.model import ModelSpec, UnsupportedModelError
from modelfiles.gguf import is_gguf

METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "auto-round": auto_round.read,
    "intel/auto-round": auto_round.read,
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fp8.read_rows,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
}
# `--quantization` -> formats of plain weights while loading. fp8 leaves `lm_head` plain, whose error affects logits most. int8
# takes it, too: on a CPU a step reads little else of that size.
_HEAD = Modules(named=frozenset({"lm_head"}))
ONLINE: dict[str, Quantization] = {
    "fp8": Quantization(name="fp8", groups=((EVERY, FP8_WHILE_LOADING),), ignored=_HEAD),
    "int4": Quantization(name="int4", groups=((EVERY, INT4_WHILE_LOADING),), ignored=_HEAD),
    "int8": Quantization(name="int8", groups=((EVERY, INT8_WHILE_LOADING),), table=INT8_TABLES),
}
_BESIDE = "hf_quant_config.json"
_EXPERT = ".experts."
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


def read_quantization(fields: Fields) -> Quantization:
    """Read `quantization_config`. Raises UnsupportedModelError, naming the field."""
    config = fields.get("quantization_config")
    if not config:
        return UNQUANTISED
    if not isinstance(config, Mapping):
        raise UnsupportedModelError(f"config.json: quantization_config must be an object, not {config!r:.40}")
    own = Fields(config)
    method = str(own.get("quant_method") or "unknown")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"config.json: quantization_config ({method}) is not supported; supported: {', '.join(METHODS)}, and"
            " unquantised weights"
        )
    check_letters(config)
    found = METHODS[method](own)
    if unread := own.unread():
        several = ", ".join(f"{name} = {str(own[name])[:40]}" for name in unread[:4])
        raise UnsupportedModelError(f"config.json: quantization_config ({method}): {several} is not supported")
    return found


def beside_config(folder: Path, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a config.json, completed from ModelOpt's separate file."""
    path = folder / _BESIDE
    if fields.get("quantization_config") or not path.is_file():
        return fields
    try:
        config = dict(json.loads(path.read_bytes())["quantization"] or {})
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise UnsupportedModelError(f"{path} can't be read: {error}") from error
    return {**fields, "quantization_config": {"quant_method": "modelopt", **config}} if config else fields


def in_files(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The model with the quantisation that is recorded in the weights' files, if config.json leaves it to them."""
    if spec.quantization is not bitsandbytes.ASKED:
        return spec
    return replace(spec, quantization=bitsandbytes.in_files(folder))


def in_tiles(spec: ModelSpec, *, device: str, dtype: str) -> ModelSpec:
    """The model with its groups of whole numbers in tiles, where a CPU multiplies these and nobody asked for floats.

    Tiles take and give float32: another dtype between them costs conversions and digits.
    """
    found = spec.quantization
    forms = {form for _, form in found.groups if form is not DENSE}
    if not (forms and all(map(_is_of_whole_numbers, forms)) and takes_tiles(device, dtype)):
        return spec
    tiled = replace(found, in_tiles=True, kv_cache=found.kv_cache or "float16")
    return replace(spec, quantization=tiled, dtype="float32")


def in_halves(spec: ModelSpec, folder: Path, *, device: str, dtype: str) -> ModelSpec:
    """The model with matrices that its files have as 16-bit floats kept so, if a CPU will compute in float32.

    They are widened exactly as they are multiplied. A checkpoint in bfloat16 is computed so, too, where the processor
    multiplies pairs of these, to which rows are rounded then.
    """
    found = spec.quantization
    in_pairs = device == "cpu" and dtype == "auto" and _suits_pairs(spec) and halves.multiplies_pairs()
    is_in_float32 = in_pairs or _computes_in_float32(spec, dtype)
    if device != "cpu" or not is_in_float32 or use_triton(torch.empty(0)):
        return spec
    try:
        modules = PlainModules.of(_plain_matrices(folder), in_pairs=in_pairs)
    except CheckpointError:  # whoever loads it says so
        return spec
    if not (modules.named and halves.is_usable()):
        return spec
    is_plain = found.table is PLAIN_TABLES or isinstance(found.table, TiledTables)  # but for kinds of tiles
    table = HalvesTables(modules, found.table) if is_plain else found.table
    kept = replace(found, in_halves=modules, table=table, kv_cache="float16" if in_pairs else found.kv_cache)
    return replace(spec, quantization=kept, dtype="float32" if in_pairs else spec.dtype)


def _suits_pairs(spec: ModelSpec) -> bool:
    """True for bfloat16 without quantisation and latents (MLA), whose matrices would be float32."""
    return (
        spec.dtype == "bfloat16"
        and spec.quantization == UNQUANTISED
        and not any(isinstance(layer.attention, MLASpec) for layer in spec.layers)
    )


def _computes_in_float32(spec: ModelSpec, dtype: str) -> bool:
    """True if a CPU does, asked for or not."""
    is_fast = spec.dtype == "bfloat16" and computes_in_bfloat16()
    return dtype == "float32" or (dtype == "auto" and not is_fast)


def _plain_matrices(folder: Path) -> dict[str, torch.dtype]:
    """The dtypes of matrices of 16-bit floats that are used as they are stored, by module.

    A tensor of all experts is a module by itself. Of experts one by one the first stands for all, which are alike.
    """
    found, of_experts = dict[str, torch.dtype](), dict[str, set[torch.dtype | None]]()
    for stored in stored_in_gguf(folder) if is_gguf(folder) else stored_tensors(folder):
        is_matrix = len(stored.shape) == 3 or (len(stored.shape) == 2 and stored.name.endswith(".weight"))
        dtype = _HALVES.get(stored.dtype) if stored.undo is None else None
        before, is_expert, own = stored.name.partition(_EXPERT)
        if is_matrix and is_expert:
            of_experts.setdefault(before, set()).add(dtype)
        is_another = own[:1].isdigit() and not own.startswith("0.")
        if is_matrix and dtype is not None and not is_another:
            found |= {stored.name: dtype, stored.name.removesuffix(".weight"): dtype}
    mixed = {before for before, dtypes in of_experts.items() if len(dtypes) > 1}
    return {name: dtype for name, dtype in found.items() if name.partition(_EXPERT)[0] not in mixed}


def _is_of_whole_numbers(form: Format) -> bool:
    is_packed = isinstance(form, Awq | Gptq | PackedRows | SignedBytes | RowsOfBytes)
    return is_packed or form is INT4_WHILE_LOADING


def online(spec: ModelSpec, name: str) -> ModelSpec:
    """The model with its plain weights quantised while loading. Raises UnsupportedModelError."""
    if name not in ONLINE:
        raise UnsupportedModelError(f"quantization = {name!r} is not supported; supported: auto, {', '.join(ONLINE)}")
    if spec.quantization != UNQUANTISED:
        raise UnsupportedModelError(
            f"quantization = {name!r}, but the checkpoint's weights are quantised ({spec.quantization.name}): use auto"
        )
    return replace(spec, quantization=ONLINE[name])
