"""Phi-3.5-MoE: LayerNorm, LongRoPE, two experts of which each weighs against those near it."""

from __future__ import annotations

from dataclasses import replace

from engine.families.experts.fields import checked, sparse_mlp
from engine.families.experts.mixtral import W1_W3_W2
from engine.families.fields import Fields, attention, flag, model, number, real, rope, sliding_window
from engine.families.ropes import rope_values
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.experts import ExpertTensors
from engine.spec.model import LayerSpec, ModelSpec, UnsupportedModelError
from engine.spec.scaling import LongRopeScaling, RopeSpec

PHI_MOE = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.01,
}
TENSORS = ExpertTensors(router=("block_sparse_moe.gate", "mlp.router"), each=W1_W3_W2)
MAGNITUDES = ("short_mscale", "long_mscale")


def read(fields: Fields) -> ModelSpec:
    if "num_experts" not in fields:
        fields = fields.over({"num_local_experts": 16})
    fields = fields.over(PHI_MOE)
    fields.ignore("input_jitter_noise", "original_max_position_embeddings")
    fields.only("num_experts_per_tok", 2)
    bias, near = flag(fields, "attention_bias"), 2 * real(fields, "router_jitter_noise", 0.01)
    if near < 0:
        raise UnsupportedModelError(f"config.json: router_jitter_noise = {near / 2} is below 0")
    rule = RoutingRule(chosen=2, score=Score.NEAR_OF_CHOSEN, near=near)
    window = sliding_window(fields)
    layer = LayerSpec(
        mixer=attention(fields, rope=_rope(fields), window=window, qkv_bias=bias, output_bias=bias),
        mlp=sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS),
    )
    layers = [layer] * number(fields, "num_hidden_layers")
    return model(fields, layers, norm="layer", norm_bias=True, head_bias=flag(fields, "lm_head_bias"))


def _rope(fields: Fields) -> RopeSpec:
    """Its magnitudes are given, not computed."""
    rotation = rope(fields, theta=1_000_000.0, legacy_type="longrope", others=MAGNITUDES)
    if not isinstance(rotation.scaling, LongRopeScaling):
        return rotation
    name, values = rope_values(fields)
    if lacking := [key for key in MAGNITUDES if not values.get(key)]:
        raise UnsupportedModelError(f"config.json: {name} of type 'longrope' lacks {lacking[0]}")
    short, long = (float(values[key]) for key in MAGNITUDES)
    return replace(rotation, scaling=replace(rotation.scaling, attention_factor=short, long_attention_factor=long))
