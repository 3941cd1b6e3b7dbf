"""`quant_method` gptq: 2 to 8 bits in groups, as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.families.quantised.auto_round import HOW_FOUND
from engine.families.quantised.fields import modules, names
from engine.families.reading.fields import Fields
from engine.formats.dense import DENSE
from engine.formats.packed import Gptq
from engine.formats.product import Format
from engine.formats.quantization import EVERY, Modules, Quantization
from engine.kernels.quantised.groups import GROUPS
from engine.spec.model import UnsupportedModelError

# Fields about calibration, and about other runtimes.
_HARMLESS_NAMES = """
act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
disable_exllama exllama_config failsafe fallback foem gptaq hyb_act max_input_length meta model_file_base_name
model_name_or_path model_seqlen module_name_preceding_first_block moe mse offload_to_disk offload_to_disk_path
pack_impl pad_token_id quant_config static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama v2
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
_OVERRIDES = {"bits", "group_size", "desc_act"}
_OF_FORMAT = (*_OVERRIDES, "checkpoint_format", "format")


def read(fields: Fields) -> Quantization:
    fields.only("checkpoint_format", "gptq", "gptq_v2")
    fields.only("format", "gptq", "gptq_v2")
    fields.only("method", "gptq")
    fields.only("data_type", "int")
    fields.only("pack_dtype", "int32")
    fields.only("is_marlin_format", False)
    fields.ignore(*_HARMLESS, *HOW_FOUND)
    fields.only("lm_head", True, False)
    ignored = [] if fields.get("lm_head") else ["lm_head"]
    inside = fields.get("modules_in_block_to_quantize") or []
    chosen = [name for inner in inside for name in _list(inner)] if isinstance(inside, list) else _list(None)
    quantised = modules(["lm_head", *chosen]) if chosen else EVERY
    ignored += names(fields, "modules_to_not_convert")
    groups = [*_overridden(fields), (quantised, _format(fields))]
    return Quantization(name="gptq", groups=tuple(groups), ignored=modules(ignored))


def _format(fields: Fields) -> Gptq:
    fields.only("bits", 2, 3, 4, 8)
    fields.only("group_size", -1, *GROUPS)
    fields.only("desc_act", True, False)
    stored = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    return Gptq(
        stored_bits=int(fields.get("bits") or 4),
        group=int(fields.get("group_size") or 128),
        less_one=stored == "gptq",
        has_order=bool(fields.get("desc_act")),
    )


def _overridden(fields: Fields) -> Iterator[tuple[Modules, Format]]:
    """Modules whose names match an expression at the beginning: "-:" leaves them plain, others override fields."""
    dynamic = fields.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise UnsupportedModelError(f"config.json: dynamic must be an object, not {dynamic!r:.40}")
    for pattern, own in dynamic.items():
        chosen = modules([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"])
        if pattern.startswith("-:"):
            yield chosen, DENSE
            continue
        if not isinstance(own, Mapping):
            raise UnsupportedModelError(f"config.json: dynamic.{pattern!r:.40} must be an object, not {own!r:.40}")
        if unknown := sorted(own.keys() - _OVERRIDES - _HARMLESS):
            raise UnsupportedModelError(
                f"config.json: dynamic.{pattern!r:.40} has {unknown[0]}, which is not supported"
            )
        yield chosen, _format(Fields({name: fields.get(name) for name in _OF_FORMAT} | dict(own)))


def _list(value: object) -> list[str]:
    found = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    if not found:
        raise UnsupportedModelError("config.json: modules_in_block_to_quantize must hold lists of names")
    return found
