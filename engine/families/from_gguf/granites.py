"""Granite's generations: four multipliers, then experts, then states."""

from __future__ import annotations

from collections.abc import Callable

from engine.families.from_gguf.entries import Config, Entries
from engine.families.from_gguf.shared import common, rope
from engine.families.from_gguf.states import OF_STATES, layers_by_state, mamba


def _granite(entries: Entries) -> Config:
    bias = {"attention_bias": entries.has("blk.0.attn_q.bias")}
    _ignore_experts(entries)
    return common(entries, "GraniteForCausalLM") | rope(entries) | _multipliers(entries) | bias


def _granite_moe(entries: Entries) -> Config:
    return common(entries, "GraniteMoeSharedForCausalLM") | rope(entries) | _multipliers(entries) | _experts(entries)


def _granite_hybrid(entries: Entries) -> Config:
    """Granite 4 with states, which rotates nothing."""
    if entries.get("rope.scaling.finetuned", True):
        raise entries.unsupported("rope.scaling.finetuned")
    kinds = layers_by_state(entries)
    kv_heads = entries.where_any("attention.head_count_kv")
    config = common(entries, "GraniteMoeHybridForCausalLM", kv_heads=kv_heads) | rope(entries) | _multipliers(entries)
    config |= mamba(entries) | {"layer_types": kinds, "position_embedding_type": "nope"}
    if entries.get("expert_count"):
        return config | _experts(entries)
    _ignore_experts(entries)
    return config | {"num_local_experts": 0, "shared_intermediate_size": config["intermediate_size"]}


def _ignore_experts(entries: Entries) -> None:
    """Dense models of the fourth generation say the size of the one MLP a second time, and that of states they have not."""
    for name in ("expert_used_count", "expert_shared_feed_forward_length", *OF_STATES):
        entries.get(name)


def _multipliers(entries: Entries) -> Config:
    return {
        "attention_multiplier": entries["attention.scale"],
        "embedding_multiplier": entries.get("embedding_scale", 1.0),
        "residual_multiplier": entries.get("residual_scale", 1.0),
        "logits_scaling": entries.get("logit_scale", 1.0),
    }


def _experts(entries: Entries) -> Config:
    return {
        "num_local_experts": entries["expert_count"],
        "num_experts_per_tok": entries["expert_used_count"],
        "shared_intermediate_size": entries.get("expert_shared_feed_forward_length") or 0,
    }


GRANITES: dict[str, Callable[[Entries], Config]] = {
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitehybrid": _granite_hybrid,
}
