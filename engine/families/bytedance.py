"""ByteDance: Seed-OSS."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, flag, gated_mlp, model, number, with_defaults
from engine.spec.model import LayerSpec, ModelSpec


def read_seed_oss(fields: Fields) -> ModelSpec:
    """Seed-OSS: Llama with biases of queries, keys and values."""
    fields = with_defaults(fields, "seed_oss")
    mixer = attention(fields, qkv_bias=flag(fields, "attention_bias"), output_bias=flag(fields, "attention_out_bias"))
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias")))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "SeedOssForCausalLM": read_seed_oss,
}
