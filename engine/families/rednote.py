"""Rednote: dots.llm1."""

from __future__ import annotations

from engine.families.reading import (
    CORRECTED,
    FULL,
    SLIDING,
    Family,
    Fields,
    attention,
    behind_dense,
    gated_mlp,
    layer_types,
    layers_by_kind,
    model,
    shared_experts,
    sigmoid_rule,
    sliding_window,
    sparse_mlp,
    with_defaults,
)
from engine.spec.attention import QkNorm
from engine.spec.model import LayerSpec, ModelSpec


def read_dots(fields: Fields) -> ModelSpec:
    """dots.llm1: Qwen3's attention, DeepSeek-V3's experts."""
    fields = with_defaults(fields, "dots1")
    window, first = sliding_window(fields), fields.number("max_window_layers")
    default = [SLIDING if window and layer >= first else FULL for layer in range(fields.number("num_hidden_layers"))]
    bias, dense = fields.flag("attention_bias"), gated_mlp(fields)
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=CORRECTED, shared=shared_experts(fields))
    layers = [
        LayerSpec(
            mixer=attention(
                fields, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm(), window=window if kind == SLIDING else 0
            ),
            mlp=sparse if there else dense,
        )
        for kind, there in zip(layer_types(fields, default), layers_by_kind(fields, behind_dense(fields)), strict=True)
    ]
    return model(fields, layers)


FAMILIES: dict[str, Family] = {
    "Dots1ForCausalLM": read_dots,
}
