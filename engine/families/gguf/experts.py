"""Mixtures of experts in GGUF entries."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.gguf.entries import Config, Entries
from engine.families.gguf.parts import rotation

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func


def chosen_experts(count: str = "num_experts") -> Callable[[Entries], Config]:
    """The number of experts, under the class's name for it, and the number for each token."""
    return lambda entries: {count: entries["expert_count"], "num_experts_per_tok": entries["expert_used_count"]}


def softmax_experts(*, renormalised: bool) -> Callable[[Entries], Config]:
    """A mixture of experts whose router's softmax is over all experts; `renormalised`: where no entry says it."""
    return lambda entries: _softmax_experts(entries, renormalised=renormalised)


def _softmax_experts(entries: Entries, *, renormalised: bool) -> Config:
    if entries.get("expert_gating_func", SOFTMAX) != SOFTMAX:
        raise entries.unsupported("expert_gating_func")
    if entries.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise entries.unsupported("expert_weights_scale")
    return {
        "num_experts": entries["expert_count"],
        "num_experts_per_tok": entries["expert_used_count"],
        "moe_intermediate_size": entries["expert_feed_forward_length"],
        "norm_topk_prob": bool(entries.get("expert_weights_norm", renormalised)),
        "mlp_only_layers": dense_layers(entries),
    }


def dense_layers(entries: Entries) -> list[int]:
    """The layers without experts."""
    return [layer for layer, sparse in enumerate(entries.layers_with("ffn_gate_inp.weight")) if not sparse]


def sigmoid_alone(entries: Entries) -> Config:
    """Refuse any scores but sigmoids, which the class takes as given."""
    if entries.get("expert_gating_func", SIGMOID) != SIGMOID:
        raise entries.unsupported("expert_gating_func")
    return {}


def sigmoid_experts(entries: Entries) -> Config:
    """Read a mixture of experts with corrected sigmoid routing after dense layers, as in DeepSeek-V3."""
    return sigmoid_alone(entries) | grouped_experts(entries)


def grouped_experts(entries: Entries) -> Config:
    """Read the experts of such mixtures, with any scores."""
    num_dense = entries.number_or("leading_dense_block_count", 0)
    if entries.get("leading_dense_block_count") is not None:
        dense = dense_layers(entries)
        entries.agree("leading_dense_block_count", len(dense) == num_dense and dense == list(range(num_dense)))
    return {
        "n_routed_experts": entries["expert_count"],
        "num_experts_per_tok": entries["expert_used_count"],
        "moe_intermediate_size": entries["expert_feed_forward_length"],
        "n_shared_experts": entries.number_or("expert_shared_count", 0),
        "norm_topk_prob": bool(entries.get("expert_weights_norm", False)),
        "routed_scaling_factor": entries.get("expert_weights_scale") or 1.0,
        "n_group": entries.get("expert_group_count") or 1,
        "topk_group": entries.get("expert_group_used_count") or 1,
        "first_k_dense_replace": num_dense,
    }


def deepseek(entries: Entries) -> Config:
    """DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash. Without an entry, a correction bias implies V3's router."""
    rotated = entries.number("rope.dimension_count")
    is_split = entries.get("attention.key_length_mla") is not None
    key, value = (entries.number(f"attention.{name}_length{'_mla' if is_split else ''}") for name in ("key", "value"))
    entries.get("attention.key_length")
    config: Config = {
        "num_key_value_heads": entries.size("attention.head_count"),
        "kv_lora_rank": entries["attention.kv_lora_rank"],
        "q_lora_rank": entries.get("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "rope_parameters": rotation(entries) | _scale_of_scores(entries),
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


def _scale_of_scores(entries: Entries) -> Config:
    """Read YaRN's attention scale (mscale): it multiplies scores, not the rotary tables."""
    scale = entries.get("rope.scaling.yarn_log_multiplier")
    return dict.fromkeys(("mscale", "mscale_all_dim"), 10 * scale) if scale else {}
