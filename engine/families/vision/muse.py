"""Muse Glimmer (Meta): the text part of a checkpoint with a vision tower."""

from __future__ import annotations

from engine.families.fields import (
    FULL,
    SLIDING,
    Fields,
    attention,
    gated_mlp,
    layer_types,
    model,
    number,
    real,
    rope,
    sliding_window,
)
from engine.families.vision.qwen import text_of
from engine.spec.attention import OutputGate, QkNorm
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, UnsupportedModelError
from engine.weights.names import StoredNames

DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-8,
}
EVERY = 4  # layers; the last one of them sees all
OTHERS = ("vision_tower.", "vision_adapter.", "vision_projection.")
NAMES = StoredNames(
    renamed={"model.language_model.": "model."}, ignored=(*OTHERS, *(f"model.{name}" for name in OTHERS))
)


def read(fields: Fields) -> ModelSpec:
    """Muse Glimmer: gated attention whose heads are normed without weights; windows where heads turn, none where they do not."""
    fields.ignore("out_hidden_size", "projector_hidden_act", "projector_hidden_size")
    fields = text_of(fields, DEFAULTS)
    fields.only("attention_bias", False)
    num_layers, window, eps = (
        number(fields, "num_hidden_layers"),
        sliding_window(fields),
        real(fields, "post_norm_eps", 0.0),
    )
    sees_all = [(num_layers - 1 - layer) % EVERY == 0 for layer in range(num_layers)]
    kinds = layer_types(fields, [FULL if there else SLIDING for there in sees_all])
    rotation, mlp = rope(fields), gated_mlp(fields)
    thetas = fields.get("layer_rope_theta") or [0 if there else rotation.theta for there in sees_all]
    if len(thetas) != num_layers or set(thetas) - {0, rotation.theta}:
        raise UnsupportedModelError(
            f"config.json: layer_rope_theta = {thetas!r:.80} must say 0 or rope_theta = {rotation.theta} for each layer"
        )
    scale = real(fields, "qk_scale_factor", 1.0) * number(fields, "head_dim") ** -0.5
    layers = [
        LayerSpec(
            mixer=attention(
                fields,
                rope=rotation if theta else None,
                window=window if kind == SLIDING else 0,
                qk_norm=QkNorm(has_weight=False),
                scale=scale,
                gate=OutputGate(module="self_attn.gate_proj"),
            ),
            mlp=mlp,
            around_mixer=BranchSpec(before="input_layernorm", after="post_attention_layernorm", after_eps=eps),
            around_mlp=BranchSpec(
                before="pre_feedforward_layernorm", after="post_feedforward_layernorm", after_eps=eps
            ),
        )
        for kind, theta in zip(kinds, thetas, strict=True)
    ]
    return model(
        fields,
        layers,
        norm="rms_plus_one",
        end_norm="rms",
        norms_embedding=True,
        logits_multiplier=real(fields, "output_multiplier", 1.0),
        logits_softcap=real(fields, "final_logit_softcapping", 0.0),
        stored=NAMES,
    )
