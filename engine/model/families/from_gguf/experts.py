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


EXPERTS: dict[str, Callable[[Entries], Config]] = {
    "qwen2moe": _qwen_2_moe,
    "qwen3moe": _qwen_3_moe,
    "qwen3vlmoe": _qwen_3_moe,
}
