"""Inception (G42): Jais 2."""

from __future__ import annotations

from engine.families.nvidia import squared_layers
from engine.families.reading import Family, Fields, model, with_defaults
from engine.spec.ends import NormSpec
from engine.spec.model import ModelSpec


def read_jais2(fields: Fields) -> ModelSpec:
    """Jais 2: LayerNorm, biases everywhere, an MLP of relu² without a gate."""
    fields = with_defaults(fields, "jais2")
    return model(fields, squared_layers(fields), eps="layer_norm_eps", norms=NormSpec(kind="layer", has_bias=True))


FAMILIES: dict[str, Family] = {
    "Jais2ForCausalLM": read_jais2,
}
