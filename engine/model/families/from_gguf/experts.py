"""Models with a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

from engine.model.families.from_gguf.entries import Config, Entries
from engine.model.families.from_gguf.shared import common, experts, full_attention, head_dim, rope


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


EXPERTS: dict[str, Callable[[Entries], Config]] = {
    "qwen2moe": _qwen_2_moe,
    "qwen3moe": _qwen_3_moe,
    "qwen3vlmoe": _qwen_3_moe,
    "gpt-oss": _gpt_oss,
}
