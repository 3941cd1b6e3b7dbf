"""Qwen3: queries and keys are normalised head by head; a window on some layers."""

from __future__ import annotations

from engine.model.families.fields import Fields, attention, flag, gated_mlp, model, windows_by_layer
from engine.model.spec import LayerSpec, ModelSpec


def read(fields: Fields) -> ModelSpec:
    bias, mlp = flag(fields, "attention_bias"), gated_mlp(fields)
    return model(
        fields,
        [
            LayerSpec(mixer=attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=True, window=window), mlp=mlp)
            for window in windows_by_layer(fields)
        ],
    )
