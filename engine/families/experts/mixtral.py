"""Mixtral: Mistral's attention, experts in every layer."""

from __future__ import annotations

from engine.families.experts.fields import checked, sparse_mlp
from engine.families.fields import Fields, attention, model, number, sliding_window
from engine.kernels.experts.rule import RoutingRule
from engine.spec.experts import ExpertTensors
from engine.spec.model import LayerSpec, ModelSpec

W1_W3_W2 = tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))
TENSORS = ExpertTensors(router=("block_sparse_moe.gate", "mlp.gate"), each=W1_W3_W2)


def read(fields: Fields) -> ModelSpec:
    rule = checked(fields, RoutingRule(chosen=number(fields, "num_experts_per_tok"), renormalised=True))
    layer = LayerSpec(
        mixer=attention(fields, window=sliding_window(fields)),
        mlp=sparse_mlp(fields, rule, size_field="intermediate_size", tensors=TENSORS),
    )
    return model(fields, [layer] * number(fields, "num_hidden_layers"))
