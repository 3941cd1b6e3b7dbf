"""OLMo 1 to 3. From 2 on norms stand after each half, none before; queries and keys are normed over all heads."""

from __future__ import annotations

from engine.families.fields import (
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
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec
from engine.spec.scaling import RopeSpec

OLMO_2 = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
OLMO = OLMO_2 | {"layer_norm_eps": 1e-5}
OLMO_3 = OLMO_2 | {"sliding_window": 4096}
AROUND_MIXER = BranchSpec(after="post_attention_layernorm")
AROUND_MLP = BranchSpec(after="post_feedforward_layernorm")


def read(fields: Fields) -> ModelSpec:
    """OLMo 1: LayerNorm without weights; queries, keys and values may be cut off."""
    fields = fields.over(OLMO)
    fields.only("layer_norm_eps", 1e-5)
    fields.ignore("rms_norm_eps")
    bias, clip = flag(fields, "attention_bias"), real(fields, "clip_qkv", 0.0)
    layer = LayerSpec(mixer=attention(fields, clip=clip, qkv_bias=bias, output_bias=bias), mlp=gated_mlp(fields))
    layers = [layer] * number(fields, "num_hidden_layers")
    return model(fields, layers, eps="layer_norm_eps", norm="layer", norm_weight=False)


def read_2(fields: Fields) -> ModelSpec:
    """OLMo 2: norms after both halves; queries and keys normed over all heads."""
    fields = fields.over(OLMO_2)
    fields.only("clip_qkv")
    layer = _layer(fields, _attention(fields, rope(fields)))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def read_3(fields: Fields) -> ModelSpec:
    """OLMo 3: OLMo 2 with a window on three layers of four."""
    fields = fields.over(OLMO_3)
    fields.only("clip_qkv")
    theta, window = real(fields, "rope_theta", 500_000.0), sliding_window(fields)
    nested = any(kind in (fields.get("rope_parameters") or {}) for kind in (FULL, SLIDING))
    full = rope(fields, kind=FULL, theta=theta)
    sliding = rope(fields, kind=SLIDING, theta=theta) if nested else RopeSpec(theta=full.theta)
    kinds = layer_types(fields, every(fields, 4))
    layers = {
        FULL: _layer(fields, _attention(fields, full)),
        SLIDING: _layer(fields, _attention(fields, sliding, window=window)),
    }
    return model(fields, [layers[kind] for kind in kinds])


def _attention(fields: Fields, rotation: RopeSpec, window: int = 0) -> AttentionSpec:
    bias = flag(fields, "attention_bias")
    qk_norm = QkNorm(over="all")
    return attention(fields, rope=rotation, window=window, qk_norm=qk_norm, qkv_bias=bias, output_bias=bias)


def _layer(fields: Fields, mixer: AttentionSpec) -> LayerSpec:
    return LayerSpec(mixer=mixer, mlp=gated_mlp(fields), around_mixer=AROUND_MIXER, around_mlp=AROUND_MLP)
