"""Families that transformers has no code for, or not by these names: another one's checkpoint, as their makers would store it."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.families.case import Case
from tests.unit.engine.families.latents import GROUPED

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """`names`: patterns of parts of names, and what becomes of them."""

    def of(name: str) -> str:
        for pattern, other in names.items():
            name = re.sub(pattern, other, name)
        return name

    return {of(name): tensor for name, tensor in tensors.items()}


def as_ling(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    config = without(
        config, "n_routed_experts", "num_local_experts", "n_shared_experts", "attention_bias", "rope_parameters"
    )
    config |= {
        "num_experts": 8,
        "num_shared_experts": 2,
        "moe_shared_expert_intermediate_size": 40,
        "use_qk_norm": True,
    }
    config |= {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32"}
    config |= {"use_bias": False, "use_qkv_bias": False, "use_rmsnorm": True, "norm_head": False}
    config |= {"partial_rotary_factor": 0.5, "rope_theta": 10_000.0, "rope_scaling": None, "embedding_dropout": 0.0}
    for layer in range(config["num_hidden_layers"]):
        under = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{under}{part}_proj.weight") for part in "qkv"]
        tensors[f"{under}query_key_value.weight"] = torch.cat(parts)
    names = {r"self_attn\.o_proj": "self_attn.dense", r"self_attn\.q_norm": "self_attn.query_layernorm"}
    names |= {r"self_attn\.k_norm": "self_attn.key_layernorm", r"\.self_attn\.": ".attention."}
    names |= {"embed_tokens": "word_embeddings", "e_score_correction_bias": "expert_bias"}
    return config, renamed(tensors, names)


def as_mimo(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    further = {"model.mtp_layers.0.input_proj.weight": torch.ones(3, 3)}
    return config | {"num_nextn_predict_layers": 1}, tensors | further


def as_internlm3(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    return without(config, "attention_bias", "mlp_bias") | {"bias": True, "qkv_bias": True}, tensors


def as_minicpm(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    names = [name for name in config if "multiplier" in name or name == "logits_scaling"]
    own = {
        "scale_emb": 6,
        "scale_depth": 0.4 * math.sqrt(2),
        "dim_model_base": 16,
        "mup_denominator": 32,
        "num_experts": 0,
    }
    return without(config, *names, "mlp_bias") | own, tensors


def as_exaone(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    names = {
        "num_layers": "num_hidden_layers",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    }
    own = {theirs: config[ours] for theirs, ours in names.items()} | {"embed_dropout": 0.0}
    config = without(config, *names.values(), "attention_bias", "mlp_bias") | own
    patterns = {
        r"self_attn\.": "attn.attention.",
        "attn.attention.o_proj": "attn.attention.out_proj",
        "gate_proj": "c_fc_0",
    }
    patterns |= {
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    }
    patterns |= {
        r"model\.layers": "transformer.h",
        r"model\.embed_tokens": "transformer.wte",
        r"model\.norm": "transformer.ln_f",
    }
    inverse = {"transformer.h.0.attn.attention.rotary.inv_freq": torch.ones(8)}
    return config, renamed(tensors, patterns) | inverse


def as_phi_3_vision(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    others = {"img_processor": {"name": "clip"}, "embd_layer": {"embedding_cls": "image"}}
    return config | others, tensors | {"model.vision_embed_tokens.glb_GN": torch.ones(3)}


def as_phi_4_multimodal(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    modules = r"(layers\.\d+\.\w+\.(?:qkv_proj|o_proj|gate_up_proj|down_proj))\."
    tensors = renamed(tensors, {modules: r"\1.base_layer."})
    adapters = {name.replace("base_layer", "lora_A.vision") for name in tensors if "base_layer" in name}
    others = {"vision_lora": {"r": 256}, "speech_lora": {"r": 320}, "audio_processor": {"name": "cascades"}}
    more = {name: torch.ones(3) for name in (*adapters, "model.embed_tokens_extend.image_embed.glb_GN")}
    return config | others, tensors | more


REWRITTEN: dict[str, tuple[Case, Callable[[Config, Tensors], tuple[Config, Tensors]]]] = {
    "BailingMoeV2ForCausalLM": (
        Case(
            name="ling",
            config="Glm4MoeConfig",
            fields={**GROUPED, "head_dim": 32, "use_qk_norm": True, "num_nextn_predict_layers": 0},
        ),
        as_ling,
    ),
    "MiMoForCausalLM": (Case(name="mimo", config="Qwen2Config"), as_mimo),
    "InternLM3ForCausalLM": (
        Case(name="internlm3", config="LlamaConfig", fields={"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        as_internlm3,
    ),
    "MiniCPMForCausalLM": (
        Case(
            name="minicpm",
            config="GraniteConfig",
            fields={"embedding_multiplier": 6.0, "attention_multiplier": 0.25, "residual_multiplier": 0.4}
            | {"logits_scaling": 4.0},
        ),
        as_minicpm,
    ),
    "ExaoneForCausalLM": (Case(name="exaone", config="LlamaConfig"), as_exaone),
    "Phi3VForCausalLM": (Case(name="phi3v", config="Phi3Config"), as_phi_3_vision),
    "Phi4MMForCausalLM": (Case(name="phi4mm", config="Phi3Config"), as_phi_4_multimodal),
}


def rewrite(folder: Path, architecture: str) -> Path:
    _, change = REWRITTEN[architecture]
    target = Path(shutil.copytree(folder, folder.with_name("rewritten")))
    config, tensors = change(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))
    (target / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    save_file(tensors, target / "model.safetensors")
    return target
