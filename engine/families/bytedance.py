"""ByteDance: Seed-OSS."""

from __future__ import annotations

from engine.families.reading import Family, Fields, attention, flag, gated_mlp, model, number
from engine.spec.model import LayerSpec, ModelSpec

SEED_OSS = {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
}


def read_seed_oss(fields: Fields) -> ModelSpec:
    """Seed-OSS: Llama with biases of queries, keys and values."""
    fields = fields.over(SEED_OSS)
    mixer = attention(fields, qkv_bias=flag(fields, "attention_bias"), output_bias=flag(fields, "attention_out_bias"))
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias")))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "SeedOssForCausalLM": read_seed_oss,
}
