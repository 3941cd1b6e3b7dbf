"""`quant_method` auto-round: Intel's tool packs like GPTQ or AWQ, and lists the bits of modules in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.quantised.fields import is_expression, modules, names
from engine.families.reading.fields import Fields
from engine.formats.dense import DENSE
from engine.formats.packed import Awq, Gptq
from engine.formats.product import Format
from engine.formats.quantization import EVERY, Modules, Quantization
from engine.kernels.quantised.groups import GROUPS
from engine.spec.model import UnsupportedModelError

# Fields about calibration and other runtimes. Files of the tool's other formats have them, too.
_HOW_FOUND = """
act_data_type act_dynamic act_group_size act_sym amp autoround_version batch_size damp_percent dataset
enable_deterministic_algorithms enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input enable_torch_compile
gradient_accumulate_steps iters low_gpu_mem_usage lr minmax_lr nsamples quant_block_list scale_dtype seqlen super_bits
super_group_size supported_types to_quant_block_names true_sequential
"""
HOW_FOUND = tuple(_HOW_FOUND.split())
_OF_FORMAT = ("bits", "group_size", "sym", "data_type", "act_bits", "packing_format", "backend")
_PLAIN_BITS = 16
# "auto_round", also alone. Old releases append the name of a kernel.
_PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq", "auto_round:exllamav2")


def read(fields: Fields) -> Quantization:
    """Read the quantisation. The head is quantised only if a field of its own says so."""
    fields.ignore(*HOW_FOUND)
    groups = _overridden(fields)
    ignored = ["lm_head"] if not any(chosen.has("lm_head") for chosen, _ in groups) else []
    ignored += names(fields, "modules_to_not_convert")
    blocks = _blocks(fields)
    groups.append((modules(blocks) if blocks else EVERY, _format(fields)))
    return Quantization(name="auto-round", groups=tuple(groups), ignored=modules(ignored))


def _blocks(fields: Fields) -> list[str]:
    """Names of the quantised blocks of layers; none: all."""
    found = fields.get("block_name_to_quantize") or []
    if isinstance(found, str):
        found = [name.strip() for name in found.split(",")]
    elif isinstance(found, list):
        found = [name for inner in found for name in (inner if isinstance(inner, list) else [inner])]
    return names(Fields({"block_name_to_quantize": found}), "block_name_to_quantize")


def _format(fields: Fields) -> Format:
    fields.only("data_type", "int")
    fields.only("act_bits", _PLAIN_BITS, 32)
    fields.only("group_size", -1, *GROUPS)
    fields.only("sym", True, False)
    packing = str(fields.get("packing_format") or fields.get("backend") or "auto_round:auto_gptq")
    fields.ignore("backend")
    group = int(fields.get("group_size") or 128)
    if packing != "auto_round" and not packing.startswith(_PACKINGS):
        raise UnsupportedModelError(
            f"config.json: packing_format = {packing!r:.40} is not supported; supported: {', '.join(_PACKINGS)}"
        )
    if "awq" in packing:
        fields.only("bits", 4)
        return Awq(group=group, has_zeros=True)
    fields.only("bits", 2, 3, 4, 8)
    less_one = "gptq" in packing and "gptqmodel" not in packing
    return Gptq(stored_bits=int(fields.get("bits") or 4), group=group, less_one=less_one, has_order=False)


def _overridden(fields: Fields) -> list[tuple[Modules, Format]]:
    """Modules with overridden fields, by name or by an expression for prefixes; 16 bits leave them plain.

    Names go before expressions. Those of one format are one group: a checkpoint may name each expert of each layer.
    """
    extra = fields.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise UnsupportedModelError(f"config.json: extra_config must be an object, not {extra!r:.40}")
    named, expressions = dict[Format, list[str]](), list[tuple[Modules, Format]]()
    for name, own in extra.items():
        if not isinstance(own, Mapping):
            raise UnsupportedModelError(f"config.json: extra_config.{name!r:.40} must be an object, not {own!r:.40}")
        format = _own_format(fields, name, own)
        if is_expression(name):
            expressions.append((modules([f"re:{name}"]), format))
        else:
            named.setdefault(format, []).append(name)
    return [(modules(each), format) for format, each in named.items()] + expressions


def _own_format(fields: Fields, name: str, own: Mapping[str, Any]) -> Format:
    if int(own.get("bits") or 0) >= _PLAIN_BITS:
        return DENSE
    if unknown := sorted(own.keys() - set(_OF_FORMAT) - set(HOW_FOUND)):
        raise UnsupportedModelError(f"config.json: extra_config.{name!r:.40} has {unknown[0]}, which is not supported")
    return _format(Fields({field: fields.get(field) for field in _OF_FORMAT} | dict(own)))
