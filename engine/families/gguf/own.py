"""Parts that one architecture alone has, of those whose layers are alike."""

from __future__ import annotations

from engine.families.gguf.entries import Config, Entries
from engine.families.gguf.parts import biases, rope, windows_by_layer

_EXPERTS_OF_MAVERICK = 128  # which norms no queries


def llama_or_mixtral(entries: Entries) -> Config:
    """Files call Mixtral Llama, too."""
    if not (experts := entries.get("expert_count")):
        return biases(entries)
    own = {"num_local_experts": experts, "num_experts_per_tok": entries["expert_used_count"]}
    return {"architectures": ["MixtralForCausalLM"]} | own


def olmo2_or_3(entries: Entries) -> Config:
    """OLMo 3 has windows, and a rotation of each kind of layer."""
    if not entries.get("attention.sliding_window"):
        return {}
    full, theta = rope(entries)["rope_parameters"], float(entries.get("rope.freq_base", 10_000.0))
    sliding = {"rope_type": "default", "rope_theta": float(entries.get("rope.freq_base_swa", theta))}
    return windows_by_layer(entries) | {
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {"full_attention": {"rope_type": "default"} | full, "sliding_attention": sliding},
    }


def phi3_positions(entries: Entries) -> Config:
    """The window, and the length that LongRoPE began with."""
    windows = {"sliding_window": entries.get("attention.sliding_window") or None}
    original = entries.get("rope.scaling.original_context_length")
    return windows | ({"original_max_position_embeddings": original} if original else {})


def exaone4_windows(entries: Entries) -> Config:
    """The small model has no windows."""
    if entries.get("attention.sliding_window"):
        return windows_by_layer(entries)
    return {"sliding_window": None, "layer_types": ["full_attention"] * entries.num_layers}


def mistral_or_ministral3(entries: Entries) -> Config:
    """Queries of Ministral 3 grow with the position; the text part of models that see is Mistral's."""
    growth = entries.get("attention.temperature_scale")
    if growth is None:
        return {}
    rotation = rope(entries)["rope_parameters"] | {"llama_4_scaling_beta": growth}
    return {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": rotation}


def gpt_oss_rope(entries: Entries) -> Config:
    """gpt-oss: files don't say that YaRN's bounds are not rounded."""
    config = rope(entries)
    if config["rope_parameters"].get("rope_type") == "yarn":
        config["rope_parameters"]["truncate"] = False
    return config


def llama4(entries: Entries) -> Config:
    """Llama 4: chunks, query scaling and every fourth layer without rope are fixed, as no entry says."""
    num_experts = entries.number("expert_count")
    entries.ignore("interleave_moe_layer_step")
    return {
        "intermediate_size_mlp": entries["feed_forward_length"],
        "intermediate_size": entries["expert_feed_forward_length"],
        "moe_layers": [at for at, there in enumerate(entries.layers_with("ffn_gate_inp.weight")) if there],
        "use_qk_norm": num_experts != _EXPERTS_OF_MAVERICK,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "no_rope_layer_interval": 4,
    }


def trinity(entries: Entries) -> Config:
    """Every fourth layer has no window, and embeddings are multiplied, as no entry says."""
    entries.ignore("expert_weights_norm")
    return {
        "num_shared_experts": entries.number_or("expert_shared_count", 0),
        "num_dense_layers": entries.number_or("leading_dense_block_count", 0),
        "route_scale": entries.get("expert_weights_scale") or 1.0,
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
    }


def ernie_experts(entries: Entries) -> Config:
    entries.ignore("expert_shared_feed_forward_length")
    return {
        "moe_num_experts": entries["expert_count"],
        "moe_k": entries["expert_used_count"],
        "moe_intermediate_size": entries["expert_feed_forward_length"],
        "moe_num_shared_experts": entries.number_or("expert_shared_count", 0),
        "moe_layer_start_index": entries.number_or("leading_dense_block_count", 0),
        "moe_layer_interval": entries.number_or("interleave_moe_layer_step", 1),
    }


def without_rms(entries: Entries) -> Config:
    """Nemotron's files say the epsilon a second time, under RMSNorm's name."""
    entries.ignore("attention.layer_norm_rms_epsilon")
    return {}
