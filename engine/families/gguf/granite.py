"""Granite: four multipliers; experts or none; states or none."""

from __future__ import annotations

from engine.families.gguf.entries import Config, Entries
from engine.families.gguf.parts import common, rope
from engine.families.gguf.recurrent import OF_STATES, layers_by_state, mamba


def hybrid(entries: Entries) -> Config:
    """Granite 4 with recurrent layers, and no rope."""
    if entries.get("rope.scaling.finetuned", True):
        raise entries.unsupported("rope.scaling.finetuned")
    kinds = layers_by_state(entries)
    kv_heads = entries.where_any("attention.head_count_kv")
    config = common(entries, kv_heads=kv_heads) | rope(entries) | multipliers(entries)
    config |= mamba(entries) | {"layer_types": kinds, "position_embedding_type": "nope"}
    if entries.get("expert_count"):
        return config | experts(entries)
    dense(entries)
    return config | {"num_local_experts": 0, "shared_intermediate_size": config["intermediate_size"]}


def dense(entries: Entries) -> Config:
    """Skip entries that dense models of the fourth generation have: the MLP's size repeated, and sizes of absent states."""
    for name in ("expert_used_count", "expert_shared_feed_forward_length", *OF_STATES):
        entries.get(name)
    return {}


def multipliers(entries: Entries) -> Config:
    return {
        "attention_multiplier": entries["attention.scale"],
        "embedding_multiplier": entries.get("embedding_scale", 1.0),
        "residual_multiplier": entries.get("residual_scale", 1.0),
        "logits_scaling": entries.get("logit_scale", 1.0),
    }


def experts(entries: Entries) -> Config:
    return {
        "num_local_experts": entries["expert_count"],
        "num_experts_per_tok": entries["expert_used_count"],
        "shared_intermediate_size": entries.get("expert_shared_feed_forward_length") or 0,
    }
