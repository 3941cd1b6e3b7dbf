"""`quant_method` awq: 4 bits in groups, as AutoAWQ and llm-awq write them."""

from __future__ import annotations

from engine.families.quantised.auto_round import HOW_FOUND
from engine.families.quantised.fields import modules, names
from engine.families.reading.fields import Fields
from engine.formats.packed import Awq
from engine.formats.quantization import EVERY, Quantization
from engine.kernels.quantised.groups import GROUPS


def read(fields: Fields) -> Quantization:
    """Read the quantisation. The head never is, although no field says so."""
    for name in ("bits", "w_bit"):
        fields.only(name, 4)
    for name in ("group_size", "q_group_size"):
        fields.only(name, -1, *GROUPS)
    fields.only("zero_point", True, False)
    fields.only("version", "gemm", "GEMM")
    fields.ignore(*HOW_FOUND, "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
    group = fields.get("group_size") or fields.get("q_group_size") or 128
    format = Awq(group=int(group), has_zeros=bool(fields.get("zero_point", True)))
    ignored = modules(["lm_head", *names(fields, "modules_to_not_convert")])
    return Quantization(name="awq", groups=((EVERY, format),), ignored=ignored)
