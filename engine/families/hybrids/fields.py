"""Fields about layers with states that several families share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.families.experts.fields import softmax_rule, sparse_mlp
from engine.families.fields import FULL, Fields, attention, flag, layer_types, model, number, rope
from engine.spec.attention import AttentionSpec, OutputGate, QkNorm
from engine.spec.experts import SharedExpertSpec, SparseMlpSpec
from engine.spec.model import LayerSpec, MlpSpec, ModelSpec, UnsupportedModelError
from engine.spec.states import DeltaSpec, Stored

LINEAR = "linear_attention"
DEFAULTS = {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "shared_expert_intermediate_size": 512,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}


def hybrid(fields: Fields, mlps: Iterable[MlpSpec], *, stored: Stored) -> ModelSpec:
    """Read a model of layers with the gated delta rule and, every few, attention with an output gate."""
    period = number(fields, "full_attention_interval")
    period_kinds = [
        FULL if (index + 1) % period == 0 else LINEAR for index in range(number(fields, "num_hidden_layers"))
    ]
    kinds = layer_types(fields, period_kinds, known=(FULL, LINEAR))
    if FULL not in kinds:
        raise UnsupportedModelError(f"config.json: layer_types without {FULL} is not supported")
    mixers: dict[str, AttentionSpec | DeltaSpec] = {FULL: _attention(fields), LINEAR: delta(fields, stored=stored)}
    layers = [LayerSpec(mixer=mixers[kind], mlp=mlp) for kind, mlp in zip(kinds, mlps, strict=True)]
    return model(fields, layers, norm="rms_plus_one")


def experts(fields: Fields) -> SparseMlpSpec:
    """Experts, and one that all tokens pass through, by a gate."""
    size = number(fields, "shared_expert_intermediate_size")
    shared = SharedExpertSpec(size=size, under="mlp.shared_expert", is_gated=True)
    return sparse_mlp(fields, softmax_rule(fields), shared=shared)


def _attention(fields: Fields) -> AttentionSpec:
    bias = flag(fields, "attention_bias")
    # M-RoPE fields of vision models: a text token's three positions are equal.
    rotation = rope(fields, others=("mrope_section", "mrope_interleaved"))
    return attention(fields, rope=rotation, qk_norm=QkNorm(), qkv_bias=bias, output_bias=bias, gate=OutputGate())


def delta(fields: Fields, *, stored: Stored, **switches: Any) -> DeltaSpec:
    """Read heads and convolution; `switches` are further fields of the spec, the family's own."""
    keys, values = number(fields, "linear_num_key_heads"), number(fields, "linear_num_value_heads")
    if values % keys:
        raise UnsupportedModelError(
            f"config.json: linear_num_value_heads = {values} is no multiple of linear_num_key_heads = {keys}"
        )
    taps = number(fields, "linear_conv_kernel_dim")
    if taps < 2:
        raise UnsupportedModelError("config.json: linear_conv_kernel_dim = 1 is not supported")
    return DeltaSpec(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=number(fields, "linear_key_head_dim"),
        value_dim=number(fields, "linear_value_head_dim"),
        taps=taps,
        stored=stored,
        **switches,
    )
