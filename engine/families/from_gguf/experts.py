"""Models with a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.from_gguf.entries import Config, Entries
from engine.families.from_gguf.shared import (
    SIGMOID,
    SOFTMAX,
    common,
    experts,
    full_attention,
    grouped_experts,
    head_dim,
    rope,
    rotation,
    sigmoid_experts,
)

_EXPERTS_OF_MAVERICK = 128  # which norms no queries


def _qwen_2_moe(entries: Entries) -> Config:
    own = {"shared_expert_intermediate_size": entries["expert_shared_feed_forward_length"]}
    config = common(entries, "Qwen2MoeForCausalLM") | rope(entries) | own | full_attention(entries)
    return config | experts(entries, renormalised=False)


def _qwen_3_moe(entries: Entries) -> Config:
    own = {"head_dim": head_dim(entries), "attention_bias": entries.has("blk.0.attn_q.bias")}
    config = common(entries, "Qwen3MoeForCausalLM") | rope(entries) | own | full_attention(entries)
    return config | experts(entries, renormalised=True)


def _gpt_oss(entries: Entries) -> Config:
    """A file doesn't say that YaRN's bounds are not rounded here."""
    config = common(entries, "GptOssForCausalLM", norm="post_attention_norm") | rope(entries)
    if config["rope_parameters"].get("rope_type") == "yarn":
        config["rope_parameters"]["truncate"] = False
    return config | {
        "head_dim": head_dim(entries),
        "attention_bias": entries.has("blk.0.attn_q.bias"),
        "sliding_window": entries["attention.sliding_window"],
        "num_local_experts": entries["expert_count"],
        "num_experts_per_tok": entries["expert_used_count"],
        "intermediate_size": entries["expert_feed_forward_length"],
    }


def _olmoe(entries: Entries) -> Config:
    return (
        common(entries, "OlmoeForCausalLM")
        | rope(entries)
        | {
            "num_experts": entries["expert_count"],
            "num_experts_per_tok": entries["expert_used_count"],
            "norm_topk_prob": bool(entries.get("expert_weights_norm", False)),
        }
    )


def _dots_1(entries: Entries) -> Config:
    own = {"head_dim": head_dim(entries), "attention_bias": entries.has("blk.0.attn_q.bias"), "sliding_window": None}
    return common(entries, "Dots1ForCausalLM") | rope(entries) | own | sigmoid_experts(entries)


def _minimax_m_2(entries: Entries) -> Config:
    if entries.get("expert_gating_func", SIGMOID) != SIGMOID:
        raise entries.unsupported("expert_gating_func")
    return (
        common(entries, "MiniMaxM2ForCausalLM")
        | rope(entries)
        | {
            "head_dim": head_dim(entries),
            "intermediate_size": entries["expert_feed_forward_length"],
            "num_local_experts": entries["expert_count"],
            "num_experts_per_tok": entries["expert_used_count"],
        }
    )


def _ernie_4_5_moe(entries: Entries) -> Config:
    entries.ignore("expert_shared_feed_forward_length")
    return (
        common(entries, "Ernie4_5_MoeForCausalLM")
        | rope(entries)
        | {
            "head_dim": head_dim(entries),
            "moe_num_experts": entries["expert_count"],
            "moe_k": entries["expert_used_count"],
            "moe_intermediate_size": entries["expert_feed_forward_length"],
            "moe_num_shared_experts": entries.number_or("expert_shared_count", 0),
            "moe_layer_start_index": entries.number_or("leading_dense_block_count", 0),
            "moe_layer_interval": entries.number_or("interleave_moe_layer_step", 1),
        }
    )


def _llama_4(entries: Entries) -> Config:
    """Chunks, growth of queries and every fourth layer without rotation are those of both models, as no entry says."""
    num_experts = entries.number("expert_count")
    entries.ignore("interleave_moe_layer_step")
    return (
        common(entries, "Llama4ForCausalLM")
        | rope(entries)
        | {
            "head_dim": head_dim(entries),
            "intermediate_size_mlp": entries["feed_forward_length"],
            "intermediate_size": entries["expert_feed_forward_length"],
            "num_local_experts": num_experts,
            "num_experts_per_tok": entries["expert_used_count"],
            "moe_layers": [at for at, there in enumerate(entries.layers_with("ffn_gate_inp.weight")) if there],
            "use_qk_norm": num_experts != _EXPERTS_OF_MAVERICK,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "no_rope_layer_interval": 4,
        }
    )


def _afmoe(entries: Entries) -> Config:
    """Trinity, whose every fourth layer has no window."""
    if entries.get("expert_gating_func", SIGMOID) != SIGMOID:
        raise entries.unsupported("expert_gating_func")
    entries.ignore("expert_weights_norm")
    return (
        common(entries, "AfmoeForCausalLM")
        | rope(entries)
        | {
            "head_dim": head_dim(entries),
            "num_experts": entries["expert_count"],
            "num_experts_per_tok": entries["expert_used_count"],
            "moe_intermediate_size": entries["expert_feed_forward_length"],
            "num_shared_experts": entries.number_or("expert_shared_count", 0),
            "num_dense_layers": entries.number_or("leading_dense_block_count", 0),
            "route_scale": entries.get("expert_weights_scale") or 1.0,
            "sliding_window": entries["attention.sliding_window"],
            "global_attn_every_n_layers": 4,
            "mup_enabled": True,
        }
    )


def _glm_4_moe(entries: Entries) -> Config:
    """GLM-4.5 to 4.7, and Solar Open, which rotates whole heads."""
    own = {
        "head_dim": head_dim(entries),
        "attention_bias": entries.has("blk.0.attn_q.bias"),
        "use_qk_norm": entries.has("blk.0.attn_q_norm.weight"),
    }
    return common(entries, "Glm4MoeForCausalLM") | rope(entries) | own | sigmoid_experts(entries)


def _deepseek_2(entries: Entries) -> Config:
    """DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash. A correction of the choice tells V3's router where no entry does."""
    rotated = entries.number("rope.dimension_count")
    is_split = entries.get("attention.key_length_mla") is not None
    key, value = (entries.number(f"attention.{name}_length{'_mla' if is_split else ''}") for name in ("key", "value"))
    entries.get("attention.key_length")
    config = common(entries, "DeepseekV3ForCausalLM") | {
        "num_key_value_heads": entries.size("attention.head_count"),
        "kv_lora_rank": entries["attention.kv_lora_rank"],
        "q_lora_rank": entries.get("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "rope_parameters": rotation(entries) | _magnitudes(entries),
    }
    if not entries.get("expert_count"):
        for name in ("expert_feed_forward_length", "expert_weights_scale", "leading_dense_block_count"):
            entries.get(name)
        return config | {"architectures": ["YoutuForCausalLM"]}
    own = grouped_experts(entries)
    is_corrected = entries.has(f"blk.{entries.num_layers - 1}.exp_probs_b.bias")
    scores = entries.get("expert_gating_func") or (SIGMOID if is_corrected else SOFTMAX)
    if scores == SIGMOID:
        return config | own
    if scores != SOFTMAX:
        raise entries.unsupported("expert_gating_func")
    method = "group_limited_greedy" if own["n_group"] > 1 else "greedy"
    return config | own | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


def _magnitudes(entries: Entries) -> Config:
    """Read YaRN's attention scale (mscale): it multiplies scores, not the rotary tables."""
    scale = entries.get("rope.scaling.yarn_log_multiplier")
    return dict.fromkeys(("mscale", "mscale_all_dim"), 10 * scale) if scale else {}


EXPERTS: dict[str, Callable[[Entries], Config]] = {
    "qwen2moe": _qwen_2_moe,
    "qwen3moe": _qwen_3_moe,
    "qwen3vlmoe": _qwen_3_moe,
    "gpt-oss": _gpt_oss,
    "olmoe": _olmoe,
    "dots1": _dots_1,
    "minimax-m2": _minimax_m_2,
    "ernie4_5-moe": _ernie_4_5_moe,
    "llama4": _llama_4,
    "afmoe": _afmoe,
    "glm4moe": _glm_4_moe,
    "deepseek2": _deepseek_2,
}
