"""Qwen3: queries and keys are normalised head by head; a window on some layers."""

from __future__ import annotations

from engine.families.fields import Fields, attention, flag, gated_mlp, model, windows_by_layer
from engine.spec.attention import QkNorm
from engine.spec.model import LayerSpec, ModelSpec

QWEN_3 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read(fields: Fields) -> ModelSpec:
    fields = fields.over(QWEN_3)
    bias, mlp = flag(fields, "attention_bias"), gated_mlp(fields)
    fields.only("use_mrope", False)
    return model(
        fields,
        [
            LayerSpec(
                mixer=attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm(), window=window), mlp=mlp
            )
            for window in windows_by_layer(fields)
        ],
    )
