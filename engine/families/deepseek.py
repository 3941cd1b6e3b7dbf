"""DeepSeek: V2, V3 (R1) and V3.2.

Latent attention; experts behind dense layers, with groups and shared ones. V3.2's attention sees only positions that an indexer
chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.families.reading import (
    CORRECTED,
    ONE_EACH,
    Family,
    Fields,
    behind_dense,
    checked,
    gated_mlp,
    layer_types,
    layers_by_kind,
    mla_attention,
    model,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
    with_defaults,
    without_predictions,
)
from engine.kernels.experts.rule import GroupScore, RoutingRule
from engine.spec.experts import ExpertTensors
from engine.spec.mla import IndexerSpec, MLASpec, SparseSpec
from engine.spec.model import BEFORE_MLP, BranchSpec, LayerSpec, ModelSpec, UnsupportedModelError

SPARSE_ATTENTION = "deepseek_sparse_attention"


def read_v2(fields: Fields) -> ModelSpec:
    """DeepSeek-V2: latent attention; softmax routing, within groups in the large model; shared experts."""
    fields = with_defaults(fields, "deepseek_v2")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)
    fields.only("mlp_bias", False)
    in_groups = fields.get("topk_method") == "group_limited_greedy"
    num_groups, groups_kept = fields.count("n_group"), fields.count("topk_group")
    rule = RoutingRule(
        chosen=fields.number("num_experts_per_tok"),
        num_groups=int(num_groups or 1) if in_groups else 1,
        groups_kept=int(groups_kept or 1) if in_groups else 1,
        group_score=GroupScore.BEST,
        scale=fields.real("routed_scaling_factor", 1.0),
    )
    return with_one_attention(fields, checked(fields, rule), ONE_EACH, interleaved=True)


def read_v3(fields: Fields) -> ModelSpec:
    """DeepSeek-V3 and R1: latent attention; sigmoid routing within groups, corrected; a shared expert."""
    fields = with_defaults(fields, "deepseek_v3")
    return with_one_attention(fields, sigmoid_rule(fields), CORRECTED, interleaved=fields.flag("rope_interleave"))


def with_one_attention(fields: Fields, rule: RoutingRule, tensors: ExpertTensors, *, interleaved: bool) -> ModelSpec:
    mixer = mla_attention(fields, interleaved=interleaved, value_dim=fields.number("v_head_dim"))
    return with_experts(fields, [mixer] * fields.number("num_hidden_layers"), rule, tensors)


def with_experts(
    fields: Fields,
    mixers: Sequence[MLASpec],
    rule: RoutingRule,
    tensors: ExpertTensors,
    *,
    around_experts: BranchSpec = BEFORE_MLP,
) -> ModelSpec:
    """Read a model of these mixers, one a layer, with experts behind dense layers."""
    fields.only("moe_layer_freq", 1)
    fields.only("ep_size", 1)
    fields.ignore("aux_loss_alpha", "seq_aux")
    stored, dense = without_predictions(fields), gated_mlp(fields)
    sparse = sparse_mlp(fields, rule, tensors=tensors, shared=shared_experts(fields))
    has_experts = layers_by_kind(fields, behind_dense(fields))
    layers = [
        LayerSpec(mixer=mixer, mlp=sparse, around_mlp=around_experts) if there else LayerSpec(mixer=mixer, mlp=dense)
        for mixer, there in zip(mixers, has_experts, strict=True)
    ]
    return model(fields, layers, stored=stored)


def read_v3_2(fields: Fields) -> ModelSpec:
    """DeepSeek-V3.2: DeepSeek-V3's layers, attention to the positions that each layer's indexer chooses."""
    fields = over_sparse(fields, "deepseek_v32")
    fields.only("indexer_rope_interleave", False)
    mixers = [sparse_attention(fields, interleaved=False)] * fields.number("num_hidden_layers")
    return with_experts(fields, mixers, sigmoid_rule(fields), CORRECTED)


def over_sparse(fields: Fields, model_type: str) -> Fields:
    fields = with_defaults(fields, model_type)
    fields.only("mlp_bias", False)
    fields.only("rope_interleave", True)
    layer_types(fields, [SPARSE_ATTENTION] * fields.number("num_hidden_layers"), known=(SPARSE_ATTENTION,))
    return fields


def sparse_attention(fields: Fields, *, interleaved: bool) -> MLASpec:
    """`interleaved`: how the indexer's heads are rotated; the layer's own are always."""
    mixer = mla_attention(fields, interleaved=True, value_dim=fields.number("v_head_dim"))
    rank, dim = fields.number("q_lora_rank"), fields.number("index_head_dim")
    if dim < mixer.sizes.rotated:
        raise UnsupportedModelError(
            f"config.json: index_head_dim = {dim} is less than qk_rope_head_dim = {mixer.sizes.rotated}, which it rotates"
        )
    indexer = IndexerSpec(num_heads=fields.number("index_n_heads"), dim=dim, interleaved=interleaved)
    sparse = SparseSpec(most=fields.number("index_topk"), indexer=indexer)
    return replace(mixer, sizes=replace(mixer.sizes, query_rank=rank), sparse=sparse)


FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": read_v2,
    "DeepseekV3ForCausalLM": read_v3,
    "DeepseekV32ForCausalLM": read_v3_2,
}
