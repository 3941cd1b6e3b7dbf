"""Kyutai: Helium."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, gated_mlp, model, rope, with_defaults
from engine.spec.model import LayerSpec, ModelSpec


def read_helium(fields: Fields) -> ModelSpec:
    """Helium: Llama with interleaved pairs."""
    fields = with_defaults(fields, "helium")
    rotation = rope(fields, theta=100_000.0, interleaved=True)
    mixer = attention(fields, rope=rotation, qkv_bias=fields.flag("attention_bias"))
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=fields.flag("mlp_bias")))
    return model(fields, [layer] * fields.number("num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "HeliumForCausalLM": read_helium,
}
