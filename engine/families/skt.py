"""SK Telecom: A.X K1."""

from __future__ import annotations

from engine.families.deepseek import with_experts
from engine.families.reading import CORRECTED, Family, Fields, mla_attention, sigmoid_rule, with_defaults
from engine.spec.model import BranchSpec, ModelSpec

NORMED = BranchSpec(before="post_attention_layernorm", after="post_mlp_layernorm")


def read_axk(fields: Fields) -> ModelSpec:
    """A.X K1 (SK Telecom): DeepSeek-V3 with a norm behind its experts."""
    fields = with_defaults(fields, "axk1")
    interleaved = fields.flag("rope_interleave")
    mixer = mla_attention(fields, interleaved=interleaved, value_dim=fields.number("v_head_dim"))
    mixers = [mixer] * fields.number("num_hidden_layers")
    return with_experts(fields, mixers, sigmoid_rule(fields), CORRECTED, around_experts=NORMED)


FAMILIES: dict[str, Family] = {
    "AXK1ForCausalLM": read_axk,
}
