"""GLM-4.5 to 4.7: sigmoid routing with a correction, and an expert that all tokens share; Solar Open is close to them."""

from __future__ import annotations

from engine.families.experts.fields import (
    CORRECTED,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
    without_predictions,
)
from engine.families.fields import Fields, attention, count, flag, gated_mlp, model, number, rope
from engine.spec.attention import QkNorm
from engine.spec.model import LayerSpec, ModelSpec

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
    "num_nextn_predict_layers": 1,
}


SOLAR_OPEN = {
    "vocab_size": 196608,
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1280,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}


def read(fields: Fields) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7: partly rotated heads; sigmoid routing with a correction, and an expert that all tokens share."""
    return text_model(fields)


def text_model(fields: Fields, others: tuple[str, ...] = ()) -> ModelSpec:
    """GLM-4.5; `others` are keys of its rope that change nothing."""
    if "num_local_experts" not in fields:
        fields = fields.over({"n_routed_experts": 128})
    fields = fields.over(GLM_4_5)
    dense, stored = gated_mlp(fields), without_predictions(fields)
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=CORRECTED, shared=shared_experts(fields))
    qk_norm = QkNorm() if flag(fields, "use_qk_norm") else None
    rotation = rope(fields, others=others)
    mixer = attention(fields, rope=rotation, qkv_bias=flag(fields, "attention_bias"), qk_norm=qk_norm)
    num_dense = count(fields, "first_k_dense_replace")
    layers = [
        LayerSpec(mixer=mixer, mlp=dense if layer < num_dense else sparse)
        for layer in range(number(fields, "num_hidden_layers"))
    ]
    return model(fields, layers, stored=stored)


def read_solar(fields: Fields) -> ModelSpec:
    """Solar Open: GLM-4.5's experts in every layer, Llama's attention."""
    # No layer is dense: `intermediate_size` changes nothing, and transformers writes none.
    if "num_local_experts" not in fields:
        fields = fields.over({"n_routed_experts": 128})
    fields = fields.over(SOLAR_OPEN)
    fields.only("first_k_dense_replace", 0)
    fields.only("use_qk_norm", False)
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=CORRECTED, shared=shared_experts(fields))
    mixer = attention(fields, rope=rope(fields, theta=1_000_000.0), qkv_bias=flag(fields, "attention_bias"))
    layer = LayerSpec(mixer=mixer, mlp=sparse)
    return model(fields, [layer] * number(fields, "num_hidden_layers"), stored=without_predictions(fields))
