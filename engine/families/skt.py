"""SK Telecom: A.X K1."""

from __future__ import annotations

from engine.families.deepseek import V3, with_experts
from engine.families.reading import CORRECTED, Family, Fields, flag, mla_attention, number, sigmoid_rule
from engine.spec.model import BranchSpec, ModelSpec

AXK_1 = V3 | {
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32768,
    "num_nextn_predict_layers": 0,
}
NORMED = BranchSpec(before="post_attention_layernorm", after="post_mlp_layernorm")


def read_axk(fields: Fields) -> ModelSpec:
    """A.X K1 (SK Telecom): DeepSeek-V3 with a norm behind its experts."""
    if "num_local_experts" not in fields:
        fields = fields.over({"n_routed_experts": 192})
    fields = fields.over(AXK_1)
    interleaved = flag(fields, "rope_interleave")
    mixer = mla_attention(fields, interleaved=interleaved, value_dim=number(fields, "v_head_dim"))
    mixers = [mixer] * number(fields, "num_hidden_layers")
    return with_experts(fields, mixers, sigmoid_rule(fields), CORRECTED, around_experts=NORMED)


FAMILIES: dict[str, Family] = {
    "AXK1ForCausalLM": read_axk,
}
