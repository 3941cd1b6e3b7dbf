"""Qwen3-Next: three layers of four keep a state; experts with one that is shared, in the layers that two fields leave."""

from __future__ import annotations

from engine.families.experts.fields import sparse_layers
from engine.families.fields import Fields, gated_mlp
from engine.families.hybrids.fields import DEFAULTS, experts, hybrid
from engine.spec.model import ModelSpec
from engine.weights.names import StoredNames

QWEN_3_NEXT = DEFAULTS | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}


def read(fields: Fields) -> ModelSpec:
    fields = fields.over(QWEN_3_NEXT)
    dense, sparse = gated_mlp(fields), experts(fields)
    spec = hybrid(fields, [sparse if chosen else dense for chosen in sparse_layers(fields)], stored="by_group")
    return spec.with_names(StoredNames(ignored=("mtp.",)))
