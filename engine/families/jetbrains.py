"""JetBrains: Mellum 2."""

from __future__ import annotations

from engine.families.reading import (
    FULL,
    SLIDING,
    SPARSE,
    Family,
    Fields,
    attention,
    gated_mlp,
    layer_types,
    layers_by_kind,
    model,
    rope,
    sliding_window,
    softmax_rule,
    sparse_mlp,
    with_defaults,
)
from engine.spec.attention import QkNorm
from engine.spec.model import LayerSpec, ModelSpec

BASES = {FULL: 500_000.0, SLIDING: 10_000.0}


def read_mellum(fields: Fields) -> ModelSpec:
    """Mellum 2: Qwen3-MoE with windows, and a rope of each kind of layer."""
    fields = with_defaults(fields, "mellum")
    bias, window, num_layers = (
        fields.flag("attention_bias"),
        sliding_window(fields),
        fields.number("num_hidden_layers"),
    )
    dense, sparse = gated_mlp(fields), sparse_mlp(fields, softmax_rule(fields))
    mixers = {
        kind: attention(
            fields,
            rope=rope(fields, kind=kind, theta=theta),
            window=window if kind == SLIDING else 0,
            qk_norm=QkNorm(),
            qkv_bias=bias,
            output_bias=bias,
        )
        for kind, theta in BASES.items()
    }
    kinds, has_experts = layer_types(fields, [FULL] * num_layers), layers_by_kind(fields, [SPARSE] * num_layers)
    layers = [
        LayerSpec(mixer=mixers[kind], mlp=sparse if there else dense)
        for kind, there in zip(kinds, has_experts, strict=True)
    ]
    return model(fields, layers)


FAMILIES: dict[str, Family] = {
    "MellumForCausalLM": read_mellum,
}
