# mypy: allow-untyped-calls
"""Checkpoints of 4 and 8 bits in groups: how each is written, by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.families.experts import CASES
from tests.unit.engine.formats.checkpoints import Store, Tensors, compressed, plain_of
from tests.unit.engine.formats.loading import Form, Tiny, single
from tests.unit.engine.formats.packing import awq, gptq, mxfp4, mxfp4_rows, nvfp4, packed_rows, signed_bytes

HEAD = ("lm_head",)
MOE, GPT_OSS = (next(case for case in CASES if case.name == name) for name in ("qwen3_moe", "gpt_oss"))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "damp_percent": 0.1}


def ours(format: str, strategy: str, **weights: Any) -> dict[str, Any]:
    config = compressed(strategy, type="int", ignore=HEAD, **weights)
    config["quantization_config"]["format"] = format
    return config


def every(config: dict[str, Any]) -> dict[str, Any]:
    """With the head."""
    return asked(**config["quantization_config"] | {"ignore": []})


def asked(**config: Any) -> dict[str, Any]:
    return {"quantization_config": config}


def beside_biases(store: Store) -> Store:
    """Attention's have values, which zeros would replace."""

    def stored(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, same = store(module, weight)
        return {kind: part for kind, part in parts.items() if kind != "bias" or "self_attn" not in module}, same

    return stored


FORMS = {
    "awq": Form("llama", awq(32), asked(**AWQ), HEAD),
    "awq, ignored": Form(
        "qwen2",
        awq(32),
        asked(**AWQ | {"modules_to_not_convert": ["k_proj", "layers.0.mlp"]}),
        ("lm_head", "k_proj", "layers.0.mlp"),
    ),
    "awq, experts": Form("qwen3_moe", awq(16), asked(**AWQ | {"group_size": 16}), ("lm_head", "mlp.gate.")),
    "gptq, experts beside one with a gate of one row": Form(
        "qwen2_moe", beside_biases(gptq(4, 16)), asked(**GPTQ | {"group_size": 16}),
        ("lm_head", "mlp.gate.", "shared_expert_gate"),
    ),
    "gptq": Form("llama", gptq(4, 32), asked(**GPTQ), HEAD),
    "gptq, head": Form("llama", gptq(4, 32), asked(**GPTQ, lm_head=True)),
    "compressed, head": Form(
        "llama", packed_rows(4, 32), every(ours("pack-quantized", "group", num_bits=4, group_size=32))
    ),
    "gptq, second version, zeros": Form(
        "qwen3", gptq(4, 16, version=2, zeros=True), asked(**GPTQ | {"group_size": 16, "checkpoint_format": "gptq_v2"}), HEAD
    ),
    "gptq, zeros from 0 on": Form("llama", gptq(4, 32, zeros=True), asked(**GPTQ | {"sym": False}), HEAD),
    "gptq, order of activations": Form(
        "llama", gptq(4, 32, has_order=True), asked(**GPTQ | {"desc_act": True}), HEAD
    ),
    "gptq, 2 bits": Form("llama", gptq(2, 16, zeros=True), asked(**GPTQ | {"bits": 2, "group_size": 16}), HEAD),
    "gptq, 3 bits, order of activations": Form(
        "qwen3", gptq(3, 32, zeros=True, has_order=True), asked(**GPTQ | {"bits": 3, "desc_act": True}), HEAD
    ),
    "gptq, modules of their own": Form(
        "llama",
        lambda module, weight: (gptq(8, 0) if "down_proj" in module else gptq(4, 32))(module, weight),
        asked(
            **GPTQ,
            dynamic={
                r"-:.*\.1\..*up_proj": {},
                r"+:.*\.down_proj$": {"bits": 8, "group_size": -1, "damp_percent": 0.2},
                ".*no_such_module": {"bits": 3},
            },
        ),
        (*HEAD, "layers.1.mlp.up_proj"),
    ),
    "gptq, 8 bits, rows": Form("llama", gptq(8, 0), asked(**GPTQ | {"bits": 8, "group_size": -1}), HEAD),
    "compressed, 4 bits": Form(
        "llama", packed_rows(4, 32), ours("pack-quantized", "group", num_bits=4, group_size=32), HEAD
    ),
    "compressed, 4 bits, zeros": Form(
        "llama",
        packed_rows(4, 32, zeros=True),
        ours("pack-quantized", "group", num_bits=4, group_size=32, symmetric=False, actorder="weight"),
        HEAD,
    ),
    "compressed, 8 bits": Form("qwen3", packed_rows(8, 0), ours("pack-quantized", "channel", num_bits=8), HEAD),
    "compressed, bytes": Form("llama", signed_bytes(), ours("int-quantized", "channel", num_bits=8), HEAD),
    "compressed, bytes, zeros": Form(
        "llama", signed_bytes(zeros=True), ours("int-quantized", "channel", num_bits=8, symmetric=False), HEAD
    ),
    "compressed, nvfp4": Form(
        "llama", nvfp4(modelopt=False),
        ours("nvfp4-pack-quantized", "tensor_group", num_bits=4, group_size=16) , HEAD,
    ),
    "compressed, mxfp4": Form(
        "llama", mxfp4_rows, ours("mxfp4-pack-quantized", "group", num_bits=4, group_size=32), HEAD
    ),
    "modelopt, nvfp4": Form(
        "llama", nvfp4(modelopt=True), asked(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"]), HEAD
    ),
}  # fmt: skip
for _name in ("compressed, nvfp4", "compressed, mxfp4"):
    FORMS[_name].config["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = "float"


def source_of(form: Form, tiny_model: Tiny, tmp_path: Path) -> Path:
    for case in CASES:
        if case.name == form.family and case.name.endswith("moe"):
            return replace(case, fields={**case.fields, "moe_intermediate_size": 48}).build(tmp_path / "moe")
    return single(tiny_model, form.family, tmp_path)


def in_mxfp4(plain: Path, folder: Path) -> Path:
    """A checkpoint of gpt-oss as it is published, and what it stands for beside it."""
    quantised, same = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in list(quantised):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            pairs, exponents, stands_for = mxfp4(quantised.pop(name).transpose(1, 2))
            quantised |= {f"{name}_blocks": pairs.unflatten(-1, (-1, 16)), f"{name}_scales": exponents}
            same[name] = stands_for.transpose(1, 2).contiguous()
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    for target, tensors, extra in ((folder, quantised, asked(**config)), (plain_of(folder), same, {})):
        shutil.copytree(plain, target)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
        fields = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**fields, **extra}))
    return folder
