"""GLM-4 (dense): half of each head is rotated, in interleaved pairs; from 0414 on norms stand before and after each half."""

from __future__ import annotations

from engine.families.fields import Fields, attention, flag, gated_mlp, model, number, rope
from engine.spec.attention import AttentionSpec
from engine.spec.model import BEFORE_MIXER, BEFORE_MLP, BranchSpec, LayerSpec, ModelSpec

DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
AROUND_MIXER = BranchSpec(before="input_layernorm", after="post_self_attn_layernorm")
AROUND_MLP = BranchSpec(before="post_attention_layernorm", after="post_mlp_layernorm")


def read(fields: Fields) -> ModelSpec:
    """GLM-4 9B: half of each head is rotated, in interleaved pairs."""
    return _read(fields, BEFORE_MIXER, BEFORE_MLP)


def read_4(fields: Fields) -> ModelSpec:
    """GLM-4-0414: GLM-4 with norms around both halves."""
    return _read(fields, AROUND_MIXER, AROUND_MLP)


def text_model(fields: Fields, others: tuple[str, ...]) -> ModelSpec:
    """GLM-4-0414 with all fields given; `others` are keys of its rope that change nothing."""
    mixer = attention(
        fields, rope=rope(fields, interleaved=True, others=others), qkv_bias=flag(fields, "attention_bias")
    )
    return _model(fields, mixer, AROUND_MIXER, AROUND_MLP)


def _read(fields: Fields, around_mixer: BranchSpec, around_mlp: BranchSpec) -> ModelSpec:
    fields = fields.over(DEFAULTS)
    mixer = attention(fields, rope=rope(fields, interleaved=True), qkv_bias=flag(fields, "attention_bias"))
    return _model(fields, mixer, around_mixer, around_mlp)


def _model(fields: Fields, mixer: AttentionSpec, around_mixer: BranchSpec, around_mlp: BranchSpec) -> ModelSpec:
    mlp = gated_mlp(fields, fused="mlp.gate_up_proj")
    layer = LayerSpec(mixer=mixer, mlp=mlp, around_mixer=around_mixer, around_mlp=around_mlp)
    return model(fields, [layer] * number(fields, "num_hidden_layers"))
