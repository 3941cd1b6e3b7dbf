"""Granite: multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from engine.families.fields import Fields, attention, flag, gated_mlp, model, number, real, rope
from engine.spec.attention import AttentionSpec
from engine.spec.model import BranchSpec, LayerSpec, MixerSpec, MlpSpec, ModelSpec

GRANITE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "attention_multiplier": 1.0,
}


def read(fields: Fields) -> ModelSpec:
    """Granite 3: four multipliers."""
    fields = fields.over(GRANITE)
    mlp = gated_mlp(fields, bias=flag(fields, "mlp_bias"))
    return around(
        fields, [layer(fields, attention_of(fields, has_rope=True), mlp)] * number(fields, "num_hidden_layers")
    )


def attention_of(fields: Fields, *, has_rope: bool) -> AttentionSpec:
    bias, rotation = flag(fields, "attention_bias"), rope(fields)
    scale = real(fields, "attention_multiplier", 1.0)
    return attention(fields, rope=rotation if has_rope else None, qkv_bias=bias, output_bias=bias, scale=scale)


def layer(fields: Fields, mixer: MixerSpec, mlp: MlpSpec) -> LayerSpec:
    multiplier = real(fields, "residual_multiplier", 1.0)
    return LayerSpec(
        mixer=mixer,
        mlp=mlp,
        around_mixer=BranchSpec(before="input_layernorm", multiplier=multiplier),
        around_mlp=BranchSpec(before="post_attention_layernorm", multiplier=multiplier),
    )


def around(fields: Fields, layers: list[LayerSpec]) -> ModelSpec:
    return model(
        fields,
        layers,
        embedding_multiplier=real(fields, "embedding_multiplier", 1.0),
        logits_multiplier=1 / real(fields, "logits_scaling", 1.0),
    )
