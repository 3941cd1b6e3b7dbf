"""Models that have layers with a state."""

from __future__ import annotations

from collections.abc import Callable

from engine.model.families.from_gguf.entries import Config, Entries
from engine.model.families.from_gguf.shared import common, head_dim, rope

_SIGMOID = 2  # expert_gating_func


def _lfm_2(entries: Entries) -> Config:
    return _with_convolutions(entries, "Lfm2ForCausalLM") | {"block_auto_adjust_ff_dim": False}


def _lfm_2_moe(entries: Entries) -> Config:
    if entries["expert_gating_func"] != _SIGMOID:
        raise entries.unsupported("expert_gating_func")
    num_dense = entries.number("leading_dense_block_count")
    own = {
        "num_dense_layers": num_dense,
        "num_experts": entries["expert_count"],
        "num_experts_per_tok": entries["expert_used_count"],
        "moe_intermediate_size": entries["expert_feed_forward_length"],
        "norm_topk_prob": bool(entries.get("expert_weights_norm", True)),
        "routed_scaling_factor": entries.get("expert_weights_scale") or 1.0,
        "use_expert_bias": entries.has(f"blk.{num_dense}.exp_probs_b.bias"),
    }
    return _with_convolutions(entries, "Lfm2MoeForCausalLM") | own


def _with_convolutions(entries: Entries, architecture: str) -> Config:
    """Layers without heads of keys and values are convolutions."""
    heads = entries.of_layers("attention.head_count_kv")
    if len(set(heads) - {0}) != 1:
        raise entries.unsupported("attention.head_count_kv")
    config = common(entries, architecture, kv_heads=max(heads)) | rope(entries, theta=1_000_000.0)
    config["norm_eps"] = config.pop("rms_norm_eps")
    kinds = ["full_attention" if there else "conv" for there in heads]
    return config | {"layer_types": kinds, "conv_L_cache": entries["shortconv.l_cache"], "head_dim": head_dim(entries)}


HYBRIDS: dict[str, Callable[[Entries], Config]] = {
    "lfm2": _lfm_2,
    "lfm2moe": _lfm_2_moe,
}
