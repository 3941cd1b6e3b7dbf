"""Mistral: `sliding_window` is every layer's. Ministral: some layers'. Ministral 3: no window, queries grow with the position."""

from __future__ import annotations

from engine.families.fields import (
    SLIDING,
    Fields,
    attention,
    gated_mlp,
    layer_types,
    model,
    number,
    rope,
    sliding_window,
)
from engine.families.ropes import rope_values
from engine.spec.model import LayerSpec, ModelSpec
from engine.spec.scaling import QueryGrowth

MISTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
MINISTRAL_3 = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": 262144,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def read(fields: Fields) -> ModelSpec:
    """Mistral 7B to Large: one kind of layer, with a window or without."""
    fields = fields.over(MISTRAL)
    layer = LayerSpec(mixer=attention(fields, window=sliding_window(fields)), mlp=gated_mlp(fields))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_by_layer(fields: Fields) -> ModelSpec:
    """Ministral: a window on some layers."""
    fields = fields.over(MISTRAL)
    window, mlp = sliding_window(fields), gated_mlp(fields)
    kinds = layer_types(fields, [SLIDING if window else "full_attention"] * number(fields, "num_hidden_layers"))
    layers = [LayerSpec(mixer=attention(fields, window=window if kind == SLIDING else 0), mlp=mlp) for kind in kinds]
    return model(fields, layers)


def read_3(fields: Fields) -> ModelSpec:
    """Ministral 3: queries grow with the position."""
    fields = fields.over(MINISTRAL_3)
    rotation = rope(fields, others=("llama_4_scaling_beta",))
    mixer = attention(fields, rope=rotation, window=sliding_window(fields), query_growth=query_growth(fields))
    return model(fields, [LayerSpec(mixer=mixer, mlp=gated_mlp(fields))] * number(fields, "num_hidden_layers"))


def query_growth(fields: Fields) -> QueryGrowth | None:
    """Read `llama_4_scaling_beta` of the rotation."""
    _, values = rope_values(fields)
    beta = values.get("llama_4_scaling_beta")
    if not beta:
        return None
    original = values.get("original_max_position_embeddings") or number(fields, "max_position_embeddings")
    return QueryGrowth(scale=float(beta), every=int(original))
