"""Qwen2 and Qwen2.5: biases on queries, keys and values; a window on some layers."""

from __future__ import annotations

from collections.abc import Mapping

from engine.families.fields import Fields, attention, gated_mlp, model, number, windows_by_layer
from engine.spec.model import LayerSpec, ModelSpec
from engine.weights.names import StoredNames

QWEN_2 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read(fields: Fields) -> ModelSpec:
    fields = _within_chunks(fields.over(QWEN_2))
    mlp = gated_mlp(fields)
    fields.only("use_mrope", False)
    return model(
        fields,
        [
            LayerSpec(mixer=attention(fields, qkv_bias=True, window=window), mlp=mlp)
            for window in windows_by_layer(fields)
        ],
    )


def read_mimo(fields: Fields) -> ModelSpec:
    """MiMo 7B (Xiaomi): Qwen2, and layers for further tokens that are not computed."""
    fields.ignore("num_nextn_predict_layers")
    return read(fields).with_names(StoredNames(ignored=("model.mtp_layers.",)))


def _within_chunks(fields: Fields) -> Fields:
    """A model of 1M tokens attends to chunks in ways of its own beyond what it was trained for. It is served up to there."""
    chunks = fields.get("dual_chunk_attention_config")
    if not isinstance(chunks, Mapping):
        return fields
    own = Fields(chunks)
    trained = min(number(own, "original_max_position_embeddings"), number(own, "chunk_size"))
    longest = min(number(fields, "max_position_embeddings"), trained)
    return fields.with_values(max_position_embeddings=longest, dual_chunk_attention_config=None)
