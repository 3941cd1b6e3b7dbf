"""Granite 3 with experts: Granite's multipliers; with a shared expert in `GraniteMoeShared`."""

from __future__ import annotations

from engine.families.dense import granite, granite_derived
from engine.families.experts.fields import checked, sparse_mlp
from engine.families.fields import Fields, count, number
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import AttentionSpec
from engine.spec.experts import ExpertTensors, SharedExpertSpec
from engine.spec.model import ModelSpec

GRANITE_MOE = granite.GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2}
TENSORS = ExpertTensors(
    router=("block_sparse_moe.router.layer", "block_sparse_moe.router"),
    all=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
)


def read(fields: Fields) -> ModelSpec:
    fields = fields.over(GRANITE_MOE)
    mixer = granite.attention_of(fields, has_rope=True)
    return _model(fields, [mixer] * number(fields, "num_hidden_layers"))


def read_swa(fields: Fields) -> ModelSpec:
    """Granite with experts and windows: sinks, and a rotation of each layer, or none."""
    fields = fields.over(GRANITE_MOE | {"sliding_window": 128})
    return _model(fields, granite_derived.mixers_with_windows(fields))


def _model(fields: Fields, mixers: list[AttentionSpec]) -> ModelSpec:
    size, shared = count(fields, "shared_intermediate_size"), None
    if size:
        shared = SharedExpertSpec(size=size, under="shared_mlp", gate_up="input_linear", down="output_linear")
    rule = RoutingRule(chosen=number(fields, "num_experts_per_tok"), score=Score.SOFTMAX_OF_CHOSEN)
    mlp = sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS, shared=shared)
    return granite.around(fields, [granite.layer(fields, mixer, mlp) for mixer in mixers])
