"""OLMoE and FlexOlmo: queries and keys are normed over all heads; experts in every layer."""

from __future__ import annotations

from engine.families.dense.olmo import AROUND_MIXER, AROUND_MLP
from engine.families.experts.fields import softmax_rule, sparse_mlp
from engine.families.fields import Fields, attention, flag, model, number, rope
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.experts import SparseMlpSpec
from engine.spec.model import LayerSpec, ModelSpec

OLMOE = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
}


FLEX_OLMO = OLMOE | {
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 5,
}


def read(fields: Fields) -> ModelSpec:
    """OLMoE: queries and keys are normed over all heads; experts in every layer."""
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 64})
    fields = fields.over(OLMOE)
    fields.only("clip_qkv")
    layer = LayerSpec(mixer=_attention(fields, theta=10_000.0), mlp=_mlp(fields))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_flex(fields: Fields) -> ModelSpec:
    """FlexOlmo: OLMoE with OLMo 2's norms, after each half."""
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 7})
    fields = fields.over(FLEX_OLMO)
    mixer = _attention(fields, theta=500_000.0)
    layer = LayerSpec(mixer=mixer, mlp=_mlp(fields), around_mixer=AROUND_MIXER, around_mlp=AROUND_MLP)
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def _attention(fields: Fields, *, theta: float) -> AttentionSpec:
    bias, rotation = flag(fields, "attention_bias"), rope(fields, theta=theta)
    return attention(fields, rope=rotation, qk_norm=QkNorm(over="all"), qkv_bias=bias, output_bias=bias)


def _mlp(fields: Fields) -> SparseMlpSpec:
    return sparse_mlp(fields, softmax_rule(fields), size_field="intermediate_size")
