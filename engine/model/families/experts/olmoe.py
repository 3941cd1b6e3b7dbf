"""OLMoE: queries and keys are normed over all heads; experts in every layer."""

from __future__ import annotations

from engine.model.families.experts.fields import softmax_rule, sparse_mlp
from engine.model.families.fields import Fields, attention, flag, model, number
from engine.model.spec import LayerSpec, ModelSpec, QkNorm

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


def read(fields: Fields) -> ModelSpec:
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 64})
    fields = fields.over(OLMOE)
    fields.only("clip_qkv")
    bias = flag(fields, "attention_bias")
    layer = LayerSpec(
        mixer=attention(fields, qk_norm=QkNorm(over="all"), qkv_bias=bias, output_bias=bias),
        mlp=sparse_mlp(fields, softmax_rule(fields), size_field="intermediate_size"),
    )
    return model(fields, [layer] * number(fields, "num_hidden_layers"))
