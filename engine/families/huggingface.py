"""Hugging Face: SmolLM3."""

from __future__ import annotations

from engine.families.reading import (
    SLIDING,
    Family,
    Fields,
    attention,
    gated_mlp,
    layer_types,
    model,
    rope,
    sliding_window,
    with_defaults,
)
from engine.spec.model import LayerSpec, ModelSpec, UnsupportedModelError


def read_smollm3(fields: Fields) -> ModelSpec:
    """SmolLM3: every fourth layer has no rope."""
    fields = with_defaults(fields, "smollm3")
    num_layers, interval = fields.number("num_hidden_layers"), fields.number("no_rope_layer_interval")
    rotated = fields.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(num_layers)]
    if len(rotated) != num_layers:
        raise UnsupportedModelError(f"config.json: no_rope_layers names {len(rotated)} layers of {num_layers}")
    window = sliding_window(fields) if fields.flag("use_sliding_window") else 0
    fields.ignore("sliding_window", "max_window_layers")
    kinds = layer_types(fields, ["full_attention" if each or not window else SLIDING for each in rotated])
    bias, mlp = fields.flag("attention_bias"), gated_mlp(fields, bias=fields.flag("mlp_bias"))
    layers = [
        LayerSpec(
            mixer=attention(
                fields,
                rope=rope(fields) if is_rotated else None,
                window=window if kind == SLIDING else 0,
                qkv_bias=bias,
                output_bias=bias,
            ),
            mlp=mlp,
        )
        for kind, is_rotated in zip(kinds, rotated, strict=True)
    ]
    return model(fields, layers)


FAMILIES: dict[str, Family] = {
    "SmolLM3ForCausalLM": read_smollm3,
}
