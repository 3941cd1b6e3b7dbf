# mypy: allow-untyped-calls
"""Checkpoints in every format of weights that ranks share, by name: how each is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gguf_files import write_gguf
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.experts import EXPERTS
from tests.unit.engine.formats.checkpoints import compressed, fp8_block, fp8_row, fp8_tensor, in_16_bits, written
from tests.unit.engine.formats.codebooks import codebook4
from tests.unit.engine.formats.forms import FORMS, asked, in_mxfp4, source_of
from tests.unit.engine.formats.loading import Form
from tests.unit.engine.gguf.cases import GPT_OSS

NATIVE = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
NF4 = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "load_in_4bit": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}
FP8_FORMS = {
    "fp8, tensor": Form("llama", fp8_tensor, compressed("tensor")),
    "fp8, rows": Form("qwen2", fp8_row, compressed("channel", ignore=("lm_head",)), ("lm_head",)),
    "fp8, blocks": Form("llama", fp8_block(32, 64), asked(**NATIVE | {"weight_block_size": [32, 64]}), ("lm_head",)),
    "fp8, blocks that shares end within": Form(
        "llama", fp8_block(128, 128), asked(**NATIVE | {"weight_block_size": [128, 128]}), ("lm_head",)
    ),
    "fp8, experts": Form(
        "qwen3_moe",
        fp8_block(128, 128),
        asked(**NATIVE | {"weight_block_size": [128, 128], "modules_to_not_convert": ["mlp.gate"]}),
        ("lm_head", "mlp.gate."),
    ),
    "bitsandbytes, nf4": Form("llama", codebook4("nf4", nested=True), asked(**NF4), ("lm_head",)),
}
WIDE = {"hidden_size": 256, "intermediate_size": 512}
# Ranks' outputs end within tiles: of keys and values, and of the table.
NARROW = Case(name="narrow", config="LlamaConfig", fields={"head_dim": 12})
ODD = Case(name="odd", config="Qwen2Config", fields={**WIDE, "tie_word_embeddings": True, "vocab_size": 516})
LLAMA = Case(name="llama", config="LlamaConfig", fields=WIDE)
TIED = Case(name="tied", config="Qwen2Config", fields={**WIDE, "tie_word_embeddings": True})
MOE = Case(
    name="moe",
    config="Qwen3MoeConfig",
    fields={**EXPERTS, **WIDE, "moe_intermediate_size": 256, "head_dim": 64, "norm_topk_prob": True},
)
GGUF_FORMS: dict[str, tuple[Case, Any]] = {
    "gguf, Q4_K and Q6_K": (LLAMA, {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q5_0"}),
    "gguf, Q8_0": (LLAMA, {"": "Q8_0"}),
    "gguf, a tied table": (TIED, {"": "Q4_K", "token_embd": "Q6_K"}),
    "gguf, experts": (MOE, {"": "Q4_K", "ffn_gate_inp": "F32", "ffn_down": "Q5_K"}),
    "gguf tiles": (LLAMA, {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q5_0"}),
    "gguf tiles, experts": (MOE, {"": "Q4_K", "ffn_gate_inp": "F32", "ffn_down": "Q5_K"}),
    "gguf tiles, a tied table that ends within a tile": (ODD, {"": "Q4_K", "token_embd": "Q6_K"}),
    "gguf tiles, some of 16 bits": (
        LLAMA,
        {"": "Q4_K", "attn_v": "F16", "ffn_down": "BF16", "token_embd": "F16", "output.weight": "BF16"},
    ),
    "gguf tiles, a tied table of 16 bits": (ODD, {"": "Q4_K", "token_embd": "F16"}),
    "gguf, gpt-oss": (GPT_OSS, {"": "Q8_0", "ffn_gate_inp": "F32", "_exps.weight": "MXFP4"}),
}
HALVES = {"awq, a head in bfloat16": ("awq", torch.bfloat16), "awq, a head in float16": ("awq", torch.float16)}
ONLINE: dict[str, tuple[str | Case, str]] = {
    "int8 while loading": ("llama", "int8"),
    "int8 while loading, a tied table": ("qwen2", "int8"),
    "int4 while loading": ("qwen3_moe", "int4"),
    "int4 while loading, outputs that end within tiles": (NARROW, "int4"),
    "fp8 while loading": ("mistral", "fp8"),
}
Tiny = Callable[[str], Path]


@dataclass(frozen=True)
class Written:
    """A checkpoint, and how an engine takes it."""

    model: Path
    dtype: str = "auto"
    quantization: str = "auto"


def _in_groups(form: Form, tiny: Tiny, folder: Path) -> Written:
    source = source_of(form, tiny, folder)
    return Written(written(source, folder / "stored", form.store, form.config, keeps=form.keeps))


def _in_gguf(name: str, folder: Path) -> Written:
    case, kinds = GGUF_FORMS[name]
    file = write_gguf(case.build(folder / "source"), folder / "model.gguf", kind=kinds, rounded=True)
    return Written(file, "auto" if name.startswith("gguf tiles") else "float32")


def write(name: str, tiny: Tiny, folder: Path) -> Written:
    """Write the checkpoint of this name; `tiny`: see the fixture `tiny_model`."""
    if name in GGUF_FORMS:
        return _in_gguf(name, folder)
    if name in HALVES:
        form, dtype = HALVES[name]
        return Written(in_16_bits(_in_groups(FORMS[form], tiny, folder).model, dtype))
    if name == "float16":
        return Written(in_16_bits(TIED.build(folder / "plain"), torch.float16))
    if name in ONLINE:
        family, quantization = ONLINE[name]
        model = tiny(family) if isinstance(family, str) else family.build(folder / "source")
        return Written(model, quantization=quantization)
    if name == "mxfp4":
        return Written(in_mxfp4(GPT_OSS.build(folder / "source"), folder / "stored"))
    return _in_groups((FORMS | FP8_FORMS)[name], tiny, folder)


NAMES = [*FORMS, *FP8_FORMS, *GGUF_FORMS, *HALVES, *ONLINE, "float16", "mxfp4"]
