"""ModelOpt's checkpoints, by `quant_algo`; the names of modules may have `*`."""

from __future__ import annotations

from engine.families.quantised.fields import kv_cache, modules, names
from engine.families.reading.fields import Fields
from engine.formats.fp8 import Fp8, Scales
from engine.formats.packed import Fp4
from engine.formats.product import Format
from engine.formats.quantization import EVERY, Quantization
from engine.spec.model import UnsupportedModelError

ALGORITHMS: dict[str, Format] = {
    "FP8": Fp8(scales=Scales.TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8(scales=Scales.ROW),
    "NVFP4": Fp4(group=16, codes="weight", of_all="weight_scale_2"),
    "FP8_PB_WO": Fp8(scales=Scales.BLOCK),
}


def read(fields: Fields) -> Quantization:
    # Groups repeat the algorithm's fields.
    fields.ignore("config_groups", "producer", "group_size", "has_zero_point")
    algorithm = str(fields.get("quant_algo"))
    if algorithm not in ALGORITHMS:
        raise UnsupportedModelError(
            f"config.json: quant_algo = {algorithm!r:.40} is not supported; supported: {', '.join(ALGORITHMS)}"
        )
    ignored = modules(names(fields, "exclude_modules", "ignore"))
    groups = ((EVERY, ALGORITHMS[algorithm]),)
    return Quantization(name=f"modelopt {algorithm}", groups=groups, ignored=ignored, kv_cache=kv_cache(fields))
