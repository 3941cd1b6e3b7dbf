"""GLM-4.5, 4.6 and 4.7: partly rotated heads; sigmoid routing with a correction, and an expert that all tokens share."""

from __future__ import annotations

from engine.model.families.experts.fields import (
    CORRECTED,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
    without_predictions,
)
from engine.model.families.fields import Fields, attention, count, flag, gated_mlp, model, number
from engine.model.spec import LayerSpec, ModelSpec, QkNorm

GLM_4_5 = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
}


def read(fields: Fields) -> ModelSpec:
    if "num_local_experts" not in fields:
        fields = fields.over({"n_routed_experts": 128})
    fields = fields.over(GLM_4_5)
    dense, stored = gated_mlp(fields), without_predictions(fields)
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=CORRECTED, shared=shared_experts(fields))
    qk_norm = QkNorm() if flag(fields, "use_qk_norm") else None
    mixer = attention(fields, qkv_bias=flag(fields, "attention_bias"), qk_norm=qk_norm)
    num_dense = count(fields, "first_k_dense_replace")
    layers = [
        LayerSpec(mixer=mixer, mlp=dense if layer < num_dense else sparse)
        for layer in range(number(fields, "num_hidden_layers"))
    ]
    return model(fields, layers, stored=stored)
