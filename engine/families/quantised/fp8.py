"""`quant_method` fp8, as models in 8-bit floats are published: scales for tensors, or for blocks.

And fbgemm_fp8, as Meta wrote Llama 3.1: a scale for each row.
"""

from __future__ import annotations

from engine.families.quantised.fields import block, kv_cache, modules, names
from engine.families.reading.fields import Fields
from engine.formats.fp8 import Fp8, Scales
from engine.formats.quantization import EVERY, Quantization


def read(fields: Fields) -> Quantization:
    """Read the quantisation. The head never is, although no field says so."""
    fields.only("activation_scheme", "dynamic", "static")
    fields.only("fmt", "e4m3", "float8_e4m3fn")
    fields.only("scale_fmt", "ue8m0", "float")
    fields.ignore("dequantize")
    ignored = modules(["lm_head", *names(fields, "modules_to_not_convert", "ignored_layers", "ignore")])
    size = block(fields, "weight_block_size")
    format = Fp8(scales=Scales.TENSOR) if size is None else Fp8(scales=Scales.BLOCK, block=size)
    return Quantization(name="fp8", groups=((EVERY, format),), ignored=ignored, kv_cache=kv_cache(fields))


def read_rows(fields: Fields) -> Quantization:
    """Read row scales. The limit of activation scales assumes one for all rows; ours are for each row."""
    fields.ignore("activation_scale_ub")
    ignored = modules(["lm_head", *names(fields, "modules_to_not_convert")])
    return Quantization(name="fbgemm_fp8", groups=((EVERY, Fp8(scales=Scales.ROW)),), ignored=ignored)
