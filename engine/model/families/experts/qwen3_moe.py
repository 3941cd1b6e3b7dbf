"""Qwen3-MoE: Qwen3's attention; experts in the layers that `decoder_sparse_step` and `mlp_only_layers` leave."""

from __future__ import annotations

from engine.model.families.experts.fields import softmax_rule, sparse_layers, sparse_mlp
from engine.model.families.fields import Fields, attention, flag, gated_mlp, model, windows_by_layer
from engine.model.spec import LayerSpec, ModelSpec, QkNorm


def read(fields: Fields) -> ModelSpec:
    fields.only("use_qk_norm", True)
    bias, dense, sparse = flag(fields, "attention_bias"), gated_mlp(fields), sparse_mlp(fields, softmax_rule(fields))
    return model(
        fields,
        [
            LayerSpec(
                mixer=attention(fields, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm(), window=window),
                mlp=sparse if has_experts else dense,
            )
            for window, has_experts in zip(windows_by_layer(fields), sparse_layers(fields), strict=True)
        ],
    )
