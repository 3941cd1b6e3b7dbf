"""Inception (G42): Jais 2."""

from __future__ import annotations

from engine.families.nvidia import squared_layers
from engine.families.reading import Family, Fields, model
from engine.spec.model import ModelSpec

JAIS_2 = {
    "vocab_size": 150272,
    "hidden_size": 3328,
    "intermediate_size": 26624,
    "num_hidden_layers": 32,
    "num_attention_heads": 26,
    "max_position_embeddings": 8192,
    "hidden_act": "relu2",
    "attention_bias": True,
    "mlp_bias": True,
    "layer_norm_eps": 1e-5,
}


def read_jais2(fields: Fields) -> ModelSpec:
    """Jais 2: LayerNorm, biases everywhere, an MLP of relu² without a gate."""
    fields = fields.over(JAIS_2)
    return model(fields, squared_layers(fields), eps="layer_norm_eps", norm="layer", norm_bias=True)


FAMILIES: dict[str, Family] = {
    "Jais2ForCausalLM": read_jais2,
}
