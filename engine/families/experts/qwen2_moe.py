"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention; beside the chosen experts a gated one that all tokens share."""

from __future__ import annotations

from engine.families.experts.fields import softmax_rule, sparse_layers, sparse_mlp
from engine.families.fields import Fields, attention, gated_mlp, model, number, windows_by_layer
from engine.spec.experts import SharedExpertSpec
from engine.spec.model import LayerSpec, ModelSpec


def read(fields: Fields) -> ModelSpec:
    bias, dense = bool(fields.get("qkv_bias", True)), gated_mlp(fields)
    size = number(fields, "shared_expert_intermediate_size")
    shared = SharedExpertSpec(size=size, under="mlp.shared_expert", is_gated=True)
    sparse = sparse_mlp(fields, softmax_rule(fields), shared=shared)
    return model(
        fields,
        [
            LayerSpec(mixer=attention(fields, qkv_bias=bias, window=window), mlp=sparse if has_experts else dense)
            for window, has_experts in zip(windows_by_layer(fields), sparse_layers(fields), strict=True)
        ],
    )
