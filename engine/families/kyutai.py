"""Kyutai: Helium."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, flag, gated_mlp, model, number, rope
from engine.spec.model import LayerSpec, ModelSpec

HELIUM = {
    "vocab_size": 48000,
    "hidden_size": 2560,
    "intermediate_size": 7040,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
}


def read_helium(fields: Fields) -> ModelSpec:
    """Helium: Llama with interleaved pairs."""
    fields = fields.over(HELIUM)
    rotation = rope(fields, theta=100_000.0, interleaved=True)
    mixer = attention(fields, rope=rotation, qkv_bias=flag(fields, "attention_bias"))
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias")))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "HeliumForCausalLM": read_helium,
}
