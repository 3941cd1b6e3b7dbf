"""Qwen2 and Qwen2.5: biases on queries, keys and values; a window on some layers."""

from __future__ import annotations

from engine.model.families.fields import Fields, attention, gated_mlp, model, windows_by_layer
from engine.model.spec import LayerSpec, ModelSpec


def read(fields: Fields) -> ModelSpec:
    mlp = gated_mlp(fields)
    return model(
        fields,
        [
            LayerSpec(mixer=attention(fields, qkv_bias=True, window=window), mlp=mlp)
            for window in windows_by_layer(fields)
        ],
    )
