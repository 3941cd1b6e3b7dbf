"""`quant_method` compressed-tensors, as llm-compressor writes it: groups of modules, each with its own format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.families.quantised.fields import block, kv_cache, modules, names
from engine.families.reading.fields import Fields
from engine.formats.fp8 import Fp8, Scales
from engine.formats.packed import Fp4, PackedRows, SignedBytes
from engine.formats.product import Format
from engine.formats.quantization import EVERY, Modules, Quantization
from engine.kernels.quantised.groups import GROUPS
from engine.spec.model import UnsupportedModelError


def _fp8(weights: Fields) -> Format:
    weights.only("type", "float")
    weights.only("num_bits", 8)
    weights.only("symmetric", True)
    strategy = weights.get("strategy")
    if strategy == "block":
        return Fp8(scales=Scales.BLOCK, block=block(weights, "block_structure") or (128, 128))
    weights.only("strategy", "tensor", "channel")
    return Fp8(scales=Scales.TENSOR if strategy == "tensor" else Scales.ROW)


def _packed(weights: Fields) -> Format:
    weights.only("num_bits", 4, 8)
    bits, (group, has_zeros) = int(weights.get("num_bits") or 4), _integers(weights)
    return PackedRows(bits=bits, group=group, has_zeros=has_zeros, has_order=weights.get("actorder") in ("group", True))


def _bytes(weights: Fields) -> Format:
    weights.only("num_bits", 8)
    weights.only("actorder", False, "weight", "static")
    group, has_zeros = _integers(weights)
    return SignedBytes(group=group, has_zeros=has_zeros)


def _integers(weights: Fields) -> tuple[int, bool]:
    """Inputs of a group, and True if there are zero points."""
    weights.only("type", "int")
    weights.only("strategy", "tensor", "channel", "group")
    weights.only("actorder", False, True, "group", "weight", "static")
    weights.only("symmetric", True, False)
    group, has_zeros = weights.get("group_size"), not weights.get("symmetric", True)
    if weights.get("strategy") == "tensor":
        return 0, has_zeros
    if weights.get("strategy") == "channel":
        return -1, has_zeros
    weights.only("group_size", -1, *GROUPS)
    return int(group or 128), has_zeros


def _nvfp4(weights: Fields) -> Format:
    _fp4(weights, 16, "tensor_group", "group")
    return Fp4(group=16, of_all="weight_global_scale", divides=True)


def _mxfp4(weights: Fields) -> Format:
    _fp4(weights, 32, "group")
    return Fp4(group=32, is_exponent=True)


def _fp4(weights: Fields, group: int, *strategies: str) -> None:
    weights.only("type", "float")
    weights.only("num_bits", 4)
    weights.only("symmetric", True)
    weights.only("group_size", group)
    weights.only("strategy", *strategies)


# `format` -> reader of a group's `weights`; fields that a reader leaves unread are refused.
FORMATS: dict[str, Callable[[Fields], Format]] = {
    "float-quantized": _fp8,
    "naive-quantized": _fp8,
    "pack-quantized": _packed,
    "int-quantized": _bytes,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}
# Fields of weights and activations about the calibration of scales.
_HARMLESS = ("observer", "observer_kwargs", "dynamic", "scale_dtype", "zp_dtype")
_CLASSES = {"Linear": EVERY}


def read(fields: Fields) -> Quantization:
    fields.ignore("global_compression_ratio", "quantization_status", "version")
    for name in ("sparsity_config", "transform_config"):
        if fields.get(name):
            raise UnsupportedModelError(f"config.json: {name} is not supported")
    ignored = modules(names(fields, "ignore"))
    named, groups = str(fields.get("format")), []
    for group in _mapping(fields, "config_groups").values():
        if not isinstance(group, Mapping):
            raise UnsupportedModelError("config.json: config_groups must hold objects")
        own = Fields(group)
        format = str(own.get("format") or named)
        if format not in FORMATS:
            raise UnsupportedModelError(
                f"config.json: format = {format!r:.40} is not supported; supported: {', '.join(FORMATS)}"
            )
        if own.get("output_activations"):
            raise UnsupportedModelError("config.json: output_activations are not supported")
        own.ignore("input_activations")
        weights = Fields(_mapping(own, "weights"))
        weights.ignore(*_HARMLESS)
        groups.append((_targets(own), FORMATS[format](weights)))
        if unread := own.unread() + weights.unread():
            raise UnsupportedModelError(
                f"config.json: {', '.join(unread)} of config_groups is not supported ({format})"
            )
    name = f"compressed-tensors {named}"
    return Quantization(name=name, groups=tuple(groups), ignored=ignored, kv_cache=kv_cache(fields))


def _targets(group: Fields) -> Modules:
    entries = names(group, "targets")
    if any(entry in _CLASSES for entry in entries):
        return EVERY
    return modules(entries)


def _mapping(fields: Fields, name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"config.json: {name} must be an object, not {value!r:.40}")
    return value
