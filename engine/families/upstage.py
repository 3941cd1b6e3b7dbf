"""Upstage: Solar Open."""

from __future__ import annotations

from engine.families.reading import (
    CORRECTED,
    Family,
    Fields,
    attention,
    flag,
    model,
    number,
    rope,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
    without_predictions,
)
from engine.spec.model import LayerSpec, ModelSpec

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


FAMILIES: dict[str, Family] = {
    "SolarOpenForCausalLM": read_solar,
}
