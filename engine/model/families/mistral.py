"""Mistral: one kind of layer; `sliding_window` is every layer's."""

from __future__ import annotations

from engine.model.families.fields import Fields, attention, gated_mlp, model, number, sliding_window
from engine.model.spec import LayerSpec, ModelSpec


def read(fields: Fields) -> ModelSpec:
    layer = LayerSpec(mixer=attention(fields, window=sliding_window(fields)), mlp=gated_mlp(fields))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))
