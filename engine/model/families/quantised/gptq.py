"""`quant_method` gptq: 4 or 8 bits in groups, as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

from engine.kernels.quantised.groups import GROUPS
from engine.model.families.known import Fields
from engine.model.families.quantised.fields import modules, names
from engine.model.formats.packed import Gptq
from engine.model.formats.quantization import EVERY, Quantization
from engine.model.spec import UnsupportedModelError

# How the codes were found, and how others run them.
_HARMLESS_NAMES = """
backend batch_size block_name_to_quantize cache_block_outputs damp_percent damp_auto_increment dataset disable_exllama
exllama_config hyb_act max_input_length meta mse model_file_base_name model_name_or_path model_seqlen
module_name_preceding_first_block offload_to_disk offload_to_disk_path pad_token_id quant_config static_groups sym
tokenizer true_sequential use_cuda_fp16 use_exllama v2
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())


def read(fields: Fields) -> Quantization:
    fields.only("bits", 4, 8)
    fields.only("group_size", -1, *GROUPS)
    fields.only("checkpoint_format", "gptq", "gptq_v2")
    fields.only("format", "gptq", "gptq_v2")
    fields.only("pack_dtype", "int32")
    fields.only("is_marlin_format", False)
    fields.ignore(*_HARMLESS)
    if fields.get("dynamic"):
        raise UnsupportedModelError(
            "config.json: dynamic, which gives modules their own bits, is not supported for gptq"
        )
    stored = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    format = Gptq(
        bits=int(fields.get("bits") or 4),
        group=int(fields.get("group_size") or 128),
        less_one=stored == "gptq",
        has_order=bool(fields.get("desc_act")),
    )
    ignored = [] if fields.get("lm_head") else ["lm_head"]
    chosen = [name for inner in fields.get("modules_in_block_to_quantize") or [] for name in _list(inner)]
    quantised = modules(["lm_head", *chosen]) if chosen else EVERY
    ignored += names(fields, "modules_to_not_convert")
    return Quantization(name="gptq", groups=((quantised, format),), ignored=modules(ignored))


def _list(value: object) -> list[str]:
    found = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    if not found:
        raise UnsupportedModelError("config.json: modules_in_block_to_quantize must hold lists of names")
    return found
