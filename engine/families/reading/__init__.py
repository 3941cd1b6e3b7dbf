"""Readers of config.json that makers' files share: its fields, and common parts of models."""

from __future__ import annotations

from engine.families.reading.defaults import DEFAULT_ROPES, with_default_rope, with_defaults
from engine.families.reading.experts import (
    CORRECTED,
    DENSE,
    GATE_UP_DOWN,
    ONE_EACH,
    SPARSE,
    W1_W3_W2,
    behind_dense,
    checked,
    layers_by_kind,
    num_experts_of,
    shared_experts,
    sigmoid_rule,
    softmax_rule,
    sparse_layers,
    sparse_mlp,
    without_predictions,
)
from engine.families.reading.fields import Fields
from engine.families.reading.layers import (
    FULL,
    SLIDING,
    Family,
    attention,
    dtype_of,
    every,
    gated_mlp,
    layer_types,
    model,
    sliding_window,
    windows_by_layer,
)
from engine.families.reading.mla import magnitude, mla_attention, without_rope
from engine.families.reading.recurrent import LINEAR, delta, kinds_of_layers, mamba, mamba_head_dim
from engine.families.reading.ropes import rope, rope_values
from engine.families.reading.vision import BESIDE_VISION, OF_IMAGES, VISUAL, text_of

__all__ = [
    "BESIDE_VISION",
    "CORRECTED",
    "DEFAULT_ROPES",
    "DENSE",
    "FULL",
    "GATE_UP_DOWN",
    "LINEAR",
    "OF_IMAGES",
    "ONE_EACH",
    "SLIDING",
    "SPARSE",
    "VISUAL",
    "W1_W3_W2",
    "Family",
    "Fields",
    "attention",
    "behind_dense",
    "checked",
    "delta",
    "dtype_of",
    "every",
    "gated_mlp",
    "kinds_of_layers",
    "layer_types",
    "layers_by_kind",
    "magnitude",
    "mamba",
    "mamba_head_dim",
    "mla_attention",
    "model",
    "num_experts_of",
    "rope",
    "rope_values",
    "shared_experts",
    "sigmoid_rule",
    "sliding_window",
    "softmax_rule",
    "sparse_layers",
    "sparse_mlp",
    "text_of",
    "windows_by_layer",
    "with_default_rope",
    "with_defaults",
    "without_predictions",
    "without_rope",
]
