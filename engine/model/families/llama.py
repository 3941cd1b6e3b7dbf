"""Llama: one kind of layer, with biases if `attention_bias` or `mlp_bias` ask for them."""

from __future__ import annotations

from engine.model.families.fields import Fields, attention, flag, gated_mlp, model, number
from engine.model.spec import LayerSpec, ModelSpec


def read(fields: Fields) -> ModelSpec:
    bias = flag(fields, "attention_bias")
    layer = LayerSpec(
        mixer=attention(fields, qkv_bias=bias, output_bias=bias), mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias"))
    )
    return model(fields, [layer] * number(fields, "num_hidden_layers"))
