"""Granite's multipliers in other models: HyperCLOVA X, and Granite with windows and sinks."""

from __future__ import annotations

from dataclasses import replace

from engine.families.dense import granite
from engine.families.fields import (
    FULL,
    SLIDING,
    Fields,
    attention,
    flag,
    gated_mlp,
    layer_types,
    model,
    number,
    real,
    rope,
    sliding_window,
)
from engine.spec.attention import AttentionSpec
from engine.spec.model import ModelSpec, UnsupportedModelError

HYPERCLOVA_X = granite.GRANITE | {"attention_multiplier": None, "use_post_norm": True}
GRANITE_SWA = {
    "vocab_size": 100352,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 128,
}


def read_hyperclova_x(fields: Fields) -> ModelSpec:
    """HyperCLOVA X: Granite with norms after the halves, too, and logits that are multiplied."""
    fields = fields.over(HYPERCLOVA_X)
    bias = flag(fields, "attention_bias")
    mixer = attention(fields, qkv_bias=bias, output_bias=bias)
    scale = real(fields, "attention_multiplier", mixer.heads.head_dim**-0.5)
    mixer = replace(mixer, scores=replace(mixer.scores, scale=scale))
    layer = granite.layer(fields, mixer, gated_mlp(fields, bias=flag(fields, "mlp_bias")))
    if flag(fields, "use_post_norm"):
        around_mixer, around_mlp = (
            replace(layer.around_mixer, after="post_norm1"),
            replace(layer.around_mlp, after="post_norm2"),
        )
        layer = replace(layer, around_mixer=around_mixer, around_mlp=around_mlp)
    return model(
        fields,
        [layer] * number(fields, "num_hidden_layers"),
        embedding_multiplier=real(fields, "embedding_multiplier", 1.0),
        logits_multiplier=real(fields, "logits_scaling", 1.0),
    )


def read_swa(fields: Fields) -> ModelSpec:
    """Granite with windows: sinks, and a rotation of each layer, or none."""
    fields = fields.over(GRANITE_SWA)
    mlp = gated_mlp(fields, bias=flag(fields, "mlp_bias"))
    return granite.around(fields, [granite.layer(fields, mixer, mlp) for mixer in mixers_with_windows(fields)])


def mixers_with_windows(fields: Fields) -> list[AttentionSpec]:
    """Each layer's attention; a base of 0 means that it doesn't rotate."""
    num_layers, rotation = number(fields, "num_hidden_layers"), rope(fields)
    kinds = layer_types(fields, [SLIDING if layer % 4 else FULL for layer in range(num_layers)])
    bases = fields.get("layer_rope_theta") or [rotation.theta] * num_layers
    if len(bases) != num_layers:
        raise UnsupportedModelError(f"config.json: layer_rope_theta names {len(bases)} layers of {num_layers}")
    if wrong := [base for base in bases if isinstance(base, str) or base < 0]:
        raise UnsupportedModelError(f"config.json: layer_rope_theta has {wrong[0]!r:.40}: 0 or more")
    bias, scale = flag(fields, "attention_bias"), real(fields, "attention_multiplier", 1.0)
    window = sliding_window(fields)
    return [
        attention(
            fields,
            rope=replace(rotation, theta=float(base)) if base else None,
            window=window if kind == SLIDING else 0,
            qkv_bias=bias,
            output_bias=bias,
            scale=scale,
            sinks=True,
        )
        for kind, base in zip(kinds, bases, strict=True)
    ]
