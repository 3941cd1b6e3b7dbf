"""Gemma 1 to 3: norms multiply by 1 + weight, embeddings by sqrt(hidden).

From 2 on norms stand before and after each half; 3 norms queries and keys, too. Of a checkpoint with vision, the text part.
"""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import (
    BESIDE_VISION,
    FULL,
    SLIDING,
    Fields,
    attention,
    every,
    gated_mlp,
    layer_types,
    model,
    rope,
    sliding_window,
    with_defaults,
)
from engine.spec.attention import QkNorm
from engine.spec.ends import EmbeddingSpec, HeadSpec, NormSpec
from engine.spec.model import BEFORE_MIXER, BranchSpec, LayerSpec, ModelSpec, UnsupportedModelError
from engine.spec.scaling import RopeSpec

AROUND_MIXER = BranchSpec(before="input_layernorm", after="post_attention_layernorm")
AROUND_MLP = BranchSpec(before="pre_feedforward_layernorm", after="post_feedforward_layernorm")


def read(fields: Fields) -> ModelSpec:
    """Gemma 1: norms of 1 + weight, embeddings multiplied."""
    fields = with_defaults(fields, "gemma")
    if fields.get("hidden_act") == "gelu" and not fields.get("hidden_activation"):
        # The first checkpoints have this name, and mean the tanh approximation.
        fields = fields.with_values(hidden_act="gelu_pytorch_tanh")
    _refuse_bidirectional(fields)
    bias = fields.flag("attention_bias")
    layer = LayerSpec(mixer=attention(fields, qkv_bias=bias, output_bias=bias), mlp=gated_mlp(fields))
    return _model(fields, [layer] * fields.number("num_hidden_layers"))


def read_2(fields: Fields) -> ModelSpec:
    """Gemma 2: norms around both halves, soft-caps, a window on every other layer."""
    fields = with_defaults(fields, "gemma2")
    fields.only("sliding_window_size", sliding_window(fields))
    kinds = layer_types(fields, every(fields, 2))
    rotation = rope(fields)
    return _model(fields, _layers(fields, kinds, {FULL: rotation, SLIDING: rotation}, qk_norm=None))


def read_vault(fields: Fields) -> ModelSpec:
    """VaultGemma: Gemma 2 without norms after the halves."""
    fields = with_defaults(fields, "gemma2")
    kinds = layer_types(fields, every(fields, 2))
    rotation = rope(fields)
    layers = _layers(fields, kinds, {FULL: rotation, SLIDING: rotation}, qk_norm=None)
    before_mlp = BranchSpec(before="pre_feedforward_layernorm")
    return _model(fields, [replace(layer, around_mixer=BEFORE_MIXER, around_mlp=before_mlp) for layer in layers])


def read_3(fields: Fields) -> ModelSpec:
    """Gemma 3: five layers of six have a window, and a rope of their own."""
    has_vision = "text_config" in fields
    fields.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    fields = with_defaults(fields.text(), "gemma3_text")
    if has_vision:
        fields.only("final_logit_softcapping")  # transformers applies none there
    period = fields.count("sliding_window_pattern") or 6
    kinds = layer_types(fields, every(fields, period))
    spec = _model(fields, _layers(fields, kinds, ropes_by_kind(fields), qk_norm=QkNorm()))
    return spec.with_names(BESIDE_VISION) if has_vision else spec


def ropes_by_kind(fields: Fields) -> dict[str, RopeSpec]:
    """Sliding-window layers have their own rope base; `rope_scaling` is for the others."""
    local, theta = fields.real("rope_local_base_freq", 10_000.0), fields.real("rope_theta", 1_000_000.0)
    if any(kind in (fields.get("rope_parameters") or {}) for kind in (FULL, SLIDING)):
        return {FULL: rope(fields, kind=FULL, theta=theta), SLIDING: rope(fields, kind=SLIDING, theta=local)}
    return {FULL: rope(fields, theta=theta), SLIDING: RopeSpec(theta=local)}


def _layers(fields: Fields, kinds: list[str], ropes: dict[str, RopeSpec], *, qk_norm: QkNorm | None) -> list[LayerSpec]:
    _refuse_bidirectional(fields)
    bias, mlp, window = fields.flag("attention_bias"), gated_mlp(fields), sliding_window(fields)
    scale, softcap = fields.real("query_pre_attn_scalar", 256) ** -0.5, fields.real("attn_logit_softcapping", 0.0)
    return [
        LayerSpec(
            mixer=attention(
                fields,
                rope=ropes[kind],
                window=window if kind == SLIDING else 0,
                qk_norm=qk_norm,
                qkv_bias=bias,
                output_bias=bias,
                scale=scale,
                softcap=softcap,
            ),
            mlp=mlp,
            around_mixer=AROUND_MIXER,
            around_mlp=AROUND_MLP,
        )
        for kind in kinds
    ]


def _model(fields: Fields, layers: list[LayerSpec]) -> ModelSpec:
    return model(
        fields,
        layers,
        norms=NormSpec(kind="rms_plus_one"),
        embedding=EmbeddingSpec(multiplier=fields.number("hidden_size") ** 0.5),
        head=HeadSpec(softcap=fields.real("final_logit_softcapping", 0.0)),
    )


def _refuse_bidirectional(fields: Fields) -> None:
    if asked := fields.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"config.json: use_bidirectional_attention = {asked!r} is not supported")
