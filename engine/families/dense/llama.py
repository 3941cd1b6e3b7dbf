"""Llama: one kind of layer, with biases if `attention_bias` or `mlp_bias` ask for them."""

from __future__ import annotations

from engine.families.fields import Fields, attention, flag, gated_mlp, model, number
from engine.spec.model import LayerSpec, ModelSpec

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def read(fields: Fields) -> ModelSpec:
    fields = fields.over(DEFAULTS)
    bias = flag(fields, "attention_bias")
    layer = LayerSpec(
        mixer=attention(fields, qkv_bias=bias, output_bias=bias), mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias"))
    )
    return model(fields, [layer] * number(fields, "num_hidden_layers"))
