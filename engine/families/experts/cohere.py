"""Command A with experts: Cohere 2's attention, parallel halves; shared experts are added, or averaged with the others."""

from __future__ import annotations

from engine.families.dense import cohere
from engine.families.experts.fields import DENSE, behind_dense, checked, layers_by_kind, sparse_mlp
from engine.families.fields import (
    SLIDING,
    Fields,
    count,
    every,
    flag,
    gated_mlp,
    layer_types,
    model,
    number,
    real,
    sliding_window,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.experts import SharedExpertSpec, SparseMlpSpec
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec

COHERE_2_MOE = cohere.COHERE_2 | {
    "head_dim": 128,
    "num_experts_per_tok": 2,
    "shared_expert_combination_strategy": "average",
    "expert_selection_fn": "softmax",
    "norm_topk_prob": True,
    "prefix_dense_sliding_window_pattern": 1,
    "sliding_window_pattern": 4,
}


def read(fields: Fields) -> ModelSpec:
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 8})
    fields = fields.over(COHERE_2_MOE)
    window = sliding_window(fields)
    sparse, around_sparse = _experts(fields)
    prefix_size = (
        "prefix_dense_intermediate_size" if count(fields, "prefix_dense_intermediate_size") else "intermediate_size"
    )
    dense, turns_in_prefix = (
        gated_mlp(fields, size=prefix_size),
        number(fields, "prefix_dense_sliding_window_pattern") == 1,
    )
    sliding = cohere.attention_of(fields, window=window, has_rope=window > 0)
    full = {has_rope: cohere.attention_of(fields, has_rope=has_rope) for has_rope in (False, True)}
    kinds = layer_types(fields, _kinds(fields))
    layers = [
        LayerSpec(
            mixer=sliding if kind == SLIDING else full[turns_in_prefix and not there],
            mlp=sparse if there else dense,
            around_mlp=around_sparse if there else cohere.SHARED,
        )
        for kind, there in zip(kinds, layers_by_kind(fields, behind_dense(fields)), strict=True)
    ]
    is_rms = fields.get("rms_norm_eps") is not None
    fields.ignore("layer_norm_eps")
    return model(
        fields,
        layers,
        eps="rms_norm_eps" if is_rms else "layer_norm_eps",
        norm="rms" if is_rms else "layer",
        logits_multiplier=real(fields, "logit_scale", 0.0625),
    )


def _experts(fields: Fields) -> tuple[SparseMlpSpec, BranchSpec]:
    """The mixture, and how it adds to the stream."""
    fields.only("expert_selection_fn", "softmax", "sigmoid")
    fields.only("shared_expert_combination_strategy", "average", "sum")
    chosen, num_shared = number(fields, "num_experts_per_tok"), count(fields, "num_shared_experts")
    rule = RoutingRule(chosen=chosen, score=Score.SOFTMAX_OF_CHOSEN)
    if fields["expert_selection_fn"] == "sigmoid":
        rule = RoutingRule(chosen=chosen, score=Score.SIGMOID, renormalised=flag(fields, "norm_topk_prob"))
    fields.ignore("norm_topk_prob")
    size = num_shared * number(fields, "intermediate_size")
    shared = SharedExpertSpec(size=size, under="mlp.shared_experts") if num_shared else None
    averages = num_shared and fields["shared_expert_combination_strategy"] == "average"
    mlp = sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", shared=shared)
    return mlp, BranchSpec(shares=True, multiplier=0.5 if averages else 1.0)


def _kinds(fields: Fields) -> list[str]:
    """Windows begin anew behind the dense layers."""
    num_dense = behind_dense(fields).count(DENSE)
    prefix, period = number(fields, "prefix_dense_sliding_window_pattern"), number(fields, "sliding_window_pattern")
    return every(fields, prefix)[:num_dense] + every(fields, period)[: number(fields, "num_hidden_layers") - num_dense]
