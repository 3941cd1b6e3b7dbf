"""Upstage: Solar Open."""

from __future__ import annotations

from engine.families.reading import (
    CORRECTED,
    Family,
    Fields,
    attention,
    model,
    rope,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
    with_defaults,
    without_predictions,
)
from engine.spec.model import LayerSpec, ModelSpec


def read_solar(fields: Fields) -> ModelSpec:
    """Solar Open: GLM-4.5's experts in every layer, Llama's attention."""
    # No layer is dense: `intermediate_size` has no effect, and transformers writes none.
    fields = with_defaults(fields, "solar_open")
    fields.only("first_k_dense_replace", 0)
    fields.only("use_qk_norm", False)
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=CORRECTED, shared=shared_experts(fields))
    mixer = attention(fields, rope=rope(fields, theta=1_000_000.0), qkv_bias=fields.flag("attention_bias"))
    layer = LayerSpec(mixer=mixer, mlp=sparse)
    return model(fields, [layer] * fields.number("num_hidden_layers"), stored=without_predictions(fields))


FAMILIES: dict[str, Family] = {
    "SolarOpenForCausalLM": read_solar,
}
