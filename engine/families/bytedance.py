"""ByteDance: Seed-OSS."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, gated_mlp, model, with_defaults
from engine.spec.model import LayerSpec, ModelSpec


def read_seed_oss(fields: Fields) -> ModelSpec:
    """Seed-OSS: Llama with biases of queries, keys and values."""
    fields = with_defaults(fields, "seed_oss")
    mixer = attention(fields, qkv_bias=fields.flag("attention_bias"), output_bias=fields.flag("attention_out_bias"))
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=fields.flag("mlp_bias")))
    return model(fields, [layer] * fields.number("num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "SeedOssForCausalLM": read_seed_oss,
}
