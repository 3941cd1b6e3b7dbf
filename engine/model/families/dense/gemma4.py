"""Gemma 4 without experts: layers without a window have heads of another size, and their values may be their keys.

Of a checkpoint with vision and audio, the text part. Not the small models, whose layers have embeddings of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.families.dense.gemma import AROUND_MIXER, AROUND_MLP
from engine.model.families.fields import (
    FULL,
    SLIDING,
    Fields,
    attention,
    every,
    flag,
    gated_mlp,
    layer_types,
    model,
    number,
    real,
    rope,
    sliding_window,
)
from engine.model.names import StoredNames
from engine.model.spec import AttentionSpec, LayerSpec, ModelSpec, QkNorm, UnsupportedModelError

DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
OTHER_PARTS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
NAMES = StoredNames(
    renamed={"model.language_model.": "model."}, ignored=(*OTHER_PARTS, *(f"model.{part}" for part in OTHER_PARTS))
)


def read(fields: Fields) -> ModelSpec:
    has_other_parts = "text_config" in fields
    fields.ignore("vision_config", "audio_config", "vision_soft_tokens_per_image")
    fields.ignore(*(name for name in fields if name.endswith(("_token_id", "_token_index"))))
    fields = fields.text().over(DEFAULTS)
    _refuse_small_and_sparse(fields)
    kinds = layer_types(fields, every(fields, 6))
    kinds[-1] = FULL
    mlp = gated_mlp(fields)
    layers = [
        LayerSpec(
            mixer=_attention(fields, kind, index),
            mlp=mlp,
            around_mixer=AROUND_MIXER,
            around_mlp=AROUND_MLP.with_scalar("layer_scalar"),
        )
        for index, kind in enumerate(kinds)
    ]
    spec = model(
        fields,
        layers,
        embedding_multiplier=number(fields, "hidden_size") ** 0.5,
        logits_softcap=real(fields, "final_logit_softcapping", 0.0),
    )
    return spec.with_names(NAMES) if has_other_parts else spec


def _attention(fields: Fields, kind: str, index: int) -> AttentionSpec:
    bias, shares, window = flag(fields, "attention_bias"), flag(fields, "attention_k_eq_v"), sliding_window(fields)
    own = _own_sizes(fields, kind, index)
    return attention(
        fields,
        rope=rope(fields, kind=kind),
        head_dim=own.get("head_dim"),
        num_kv_heads=own.get("num_key_value_heads"),
        window=window if kind == SLIDING else 0,
        qk_norm=QkNorm(),
        value_norm=True,
        values_are_keys=shares and kind == FULL,
        qkv_bias=bias,
        output_bias=bias,
        scale=1.0,
    )


def _own_sizes(fields: Fields, kind: str, index: int) -> Mapping[str, Any]:
    """A layer's sizes where they differ from the model's, in transformers' form or the published one."""
    by_layer = fields.get("per_layer_config")
    global_head_dim, global_heads = fields.get("global_head_dim"), fields.get("num_global_key_value_heads")
    if by_layer is not None:
        if not all(key.isdigit() for key in by_layer):
            raise UnsupportedModelError(
                f"config.json: per_layer_config = {sorted(by_layer)} does not name layers by number"
            )
        own: Mapping[str, Any] = {int(key): value for key, value in by_layer.items()}.get(index, {})
        if unknown := own.keys() - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(f"config.json: per_layer_config has {sorted(unknown)}, which is not supported")
        return own
    if kind != FULL:
        return {}
    return {"head_dim": global_head_dim} | (
        {"num_key_value_heads": global_heads} if flag(fields, "attention_k_eq_v") else {}
    )


def _refuse_small_and_sparse(fields: Fields) -> None:
    fields.only("hidden_size_per_layer_input", 0)
    fields.only("num_kv_shared_layers", 0)
    fields.only("enable_moe_block", False)
    fields.only("use_double_wide_mlp", False)
    fields.only("use_bidirectional_attention", "vision")
    fields.ignore("vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size")
