"""`quant_method` mxfp4: experts in 4-bit floats, as in gpt-oss."""

from __future__ import annotations

from engine.families.quantised.fields import modules, names
from engine.families.reading.fields import Fields
from engine.formats.mxfp4 import MXFP4
from engine.formats.quantization import Modules, Quantization

_EXPERTS = Modules(patterns=(r".*\.mlp\.experts\..*",))


def read(fields: Fields) -> Quantization:
    """Read the quantisation. Only experts are quantised, although no field says so."""
    fields.ignore("dequantize", "use_kernels")
    ignored = modules(names(fields, "modules_to_not_convert"))
    return Quantization(name="mxfp4", groups=((_EXPERTS, MXFP4),), ignored=ignored)
