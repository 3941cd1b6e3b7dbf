"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which may have experts. The three positions that images have are one in text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.dense.qwen2 import QWEN_2
from engine.families.experts.fields import GATE_UP_DOWN, checked, sparse_layers, sparse_mlp
from engine.families.fields import Fields, attention, flag, gated_mlp, model, number, rope, windows_by_layer
from engine.formats.product import Order
from engine.kernels.experts.rule import RoutingRule
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.experts import ExpertTensors
from engine.spec.model import LayerSpec, ModelSpec
from engine.weights.names import StoredNames

NAMES = StoredNames(renamed={"model.language_model.": "model."}, ignored=("model.visual.", "visual."))
QWEN_2_VL = QWEN_2 | {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
}
QWEN_3_VL_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
}
QWEN_3_VL = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 500_000.0,
}
# Qwen published experts by columns, transformers 5 saves them by rows.
EITHER_WAY = ExpertTensors(each=GATE_UP_DOWN, order=Order.ROWS_OR_COLUMNS)
OF_IMAGES = ("mrope_section", "mrope_interleaved", "interleaved")
OF_THINKERS = StoredNames(
    renamed={"thinker.": ""},
    ignored=(
        "audio_tower.",
        "visual.",
        "thinker.audio_tower.",
        "thinker.visual.",
        "talker.",
        "token2wav.",
        "code2wav.",
    ),
)
QWEN_2_OMNI = QWEN_2_VL | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
}
QWEN_3_OMNI = {
    "vocab_size": 3584,
    "hidden_size": 2048,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


def read_2(fields: Fields) -> ModelSpec:
    """Qwen2-VL and Qwen2.5-VL: Qwen2's text model in a checkpoint with a vision tower."""
    return _text_2(text_of(fields, QWEN_2_VL)).with_names(NAMES)


def read_omni_2(fields: Fields) -> ModelSpec:
    """Qwen2.5-Omni: the thinker's text part, Qwen2."""
    return _text_2(_thinker(fields, QWEN_2_OMNI)).with_names(OF_THINKERS)


def _text_2(fields: Fields) -> ModelSpec:
    rotation, mlp = rope(fields, theta=1_000_000.0, others=OF_IMAGES), gated_mlp(fields)
    layers = [
        LayerSpec(mixer=attention(fields, rope=rotation, qkv_bias=True, window=window), mlp=mlp)
        for window in windows_by_layer(fields)
    ]
    return model(fields, layers)


def read_3(fields: Fields) -> ModelSpec:
    """Qwen3-VL: Qwen3's text model in a checkpoint with a vision tower."""
    fields = text_of(fields, QWEN_3_VL)
    layer = LayerSpec(mixer=_attention_of_3(fields), mlp=gated_mlp(fields))
    return model(fields, [layer] * number(fields, "num_hidden_layers"), stored=NAMES)


def read_3_moe(fields: Fields) -> ModelSpec:
    """Qwen3-VL with experts: Qwen3-MoE's text model in a checkpoint with a vision tower."""
    return _text_3_moe(text_of(fields, QWEN_3_VL_MOE), num_experts=60).with_names(NAMES)


def read_omni_3(fields: Fields) -> ModelSpec:
    """Qwen3-Omni: the thinker's text part, Qwen3 with experts."""
    return _text_3_moe(_thinker(fields, QWEN_3_OMNI), num_experts=128).with_names(OF_THINKERS)


def _text_3_moe(fields: Fields, *, num_experts: int) -> ModelSpec:
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": num_experts})
    fields.only("norm_topk_prob", True)
    rule = checked(fields, RoutingRule(chosen=number(fields, "num_experts_per_tok"), renormalised=True))
    dense, sparse = gated_mlp(fields), sparse_mlp(fields, rule, tensors=EITHER_WAY)
    mixer = _attention_of_3(fields)
    layers = [LayerSpec(mixer=mixer, mlp=sparse if there else dense) for there in sparse_layers(fields)]
    return model(fields, layers)


def _attention_of_3(fields: Fields) -> AttentionSpec:
    bias, rotation = flag(fields, "attention_bias"), rope(fields, theta=500_000.0, others=OF_IMAGES)
    return attention(fields, rope=rotation, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm())


def _thinker(fields: Fields, defaults: Mapping[str, Any]) -> Fields:
    """The text model's fields of a thinker, or of a checkpoint with a thinker and a talker."""
    inner = fields.get("thinker_config")
    if isinstance(inner, Mapping):
        fields = fields.with_values(**inner)
        fields.ignore("thinker_config", "talker_config", "token2wav_config", "code2wav_config", "enable_audio_output")
    fields.ignore("audio_config", "position_id_per_seconds", "seconds_per_chunk", "enable_talker")
    fields.ignore(*(name for name in fields if name.endswith("_token_index")))
    return text_of(fields, defaults)


def text_of(fields: Fields, defaults: Mapping[str, Any]) -> Fields:
    """The text model's fields, which older checkpoints have beside `vision_config`."""
    of_images = ("vision_config", *(name for name in fields if name.endswith("_token_id")))
    fields.ignore(*of_images)
    inner = fields.text().over(defaults)
    inner.ignore(*of_images)
    return inner
