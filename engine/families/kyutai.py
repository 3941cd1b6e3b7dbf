"""Kyutai: Helium."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, flag, gated_mlp, model, number, rope, with_defaults
from engine.spec.model import LayerSpec, ModelSpec


def read_helium(fields: Fields) -> ModelSpec:
    """Helium: Llama with interleaved pairs."""
    fields = with_defaults(fields, "helium")
    rotation = rope(fields, theta=100_000.0, interleaved=True)
    mixer = attention(fields, rope=rotation, qkv_bias=flag(fields, "attention_bias"))
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias")))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "HeliumForCausalLM": read_helium,
}
