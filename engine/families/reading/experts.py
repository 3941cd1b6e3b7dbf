"""Common readers of mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

from engine.families.reading.fields import NUM_EXPERTS, Fields
from engine.families.reading.layers import gated_mlp
from engine.kernels.experts.rule import GroupScore, RoutingRule, Score
from engine.spec.experts import ExpertTensors, RouterSpec, SharedExpertSpec, SparseMlpSpec
from engine.spec.model import UnsupportedModelError
from engine.weights.names import StoredNames

DENSE, SPARSE = "dense", "sparse"
GATE_UP_DOWN = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
ONE_EACH = ExpertTensors(each=GATE_UP_DOWN)
CORRECTED = ExpertTensors(each=GATE_UP_DOWN, correction=("mlp.gate.e_score_correction_bias",))
W1_W3_W2 = tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))


def softmax_rule(fields: Fields) -> RoutingRule:
    """Top-k of softmax, renormalised if `norm_topk_prob`."""
    rule = RoutingRule(
        chosen=fields.number("num_experts_per_tok"),
        score=Score.SOFTMAX,
        renormalised=fields.flag("norm_topk_prob"),
    )
    return checked(fields, rule)


def sigmoid_rule(fields: Fields) -> RoutingRule:
    """Top-k of sigmoid, within the groups whose two best scores sum highest."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    rule = RoutingRule(
        chosen=fields.number("num_experts_per_tok"),
        score=Score.SIGMOID,
        num_groups=fields.count("n_group") or 1,
        groups_kept=fields.count("topk_group") or 1,
        group_score=GroupScore.TWO_BEST,
        renormalised=fields.flag("norm_topk_prob"),
        scale=fields.real("routed_scaling_factor", 1.0),
    )
    return checked(fields, rule)


def num_experts_of(fields: Fields) -> int:
    """Number of experts, under any of transformers' names for the field."""
    return fields.number(next((name for name in NUM_EXPERTS if name in fields), NUM_EXPERTS[0]))


def checked(fields: Fields, rule: RoutingRule) -> RoutingRule:
    """Return the rule. Raises UnsupportedModelError if it can't choose among so many experts."""
    num_experts = num_experts_of(fields)
    if num_experts % rule.num_groups:
        raise UnsupportedModelError(f"config.json: {num_experts} experts in n_group = {rule.num_groups} groups")
    if rule.groups_kept > rule.num_groups:
        raise UnsupportedModelError(f"config.json: topk_group = {rule.groups_kept} of n_group = {rule.num_groups}")
    if rule.chosen > num_experts // rule.num_groups * rule.groups_kept:
        raise UnsupportedModelError(f"config.json: num_experts_per_tok = {rule.chosen} of {num_experts} experts")
    return rule


def sparse_mlp(
    fields: Fields,
    rule: RoutingRule,
    *,
    size_field: str = "moe_intermediate_size",
    tensors: ExpertTensors = ONE_EACH,
    shared: SharedExpertSpec | None = None,
    router_bias: bool = False,
) -> SparseMlpSpec:
    gated_mlp(fields)  # experts have the activation of dense layers
    return SparseMlpSpec(
        num_experts=num_experts_of(fields),
        size=fields.number(size_field),
        router=RouterSpec(rule=rule, bias=router_bias),
        tensors=tensors,
        shared=shared,
    )


def shared_experts(fields: Fields, name: str = "n_shared_experts") -> SharedExpertSpec | None:
    """The experts counted by the field, computed as one."""
    num_shared = fields.count(name)
    if not num_shared:
        return None
    return SharedExpertSpec(size=num_shared * fields.number("moe_intermediate_size"), under="mlp.shared_experts")


def without_predictions(fields: Fields) -> StoredNames:
    """Names of a checkpoint without its last layers, which predict further tokens and are not computed."""
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    first = fields.number("num_hidden_layers")
    extra = fields.count("num_nextn_predict_layers")
    return StoredNames(ignored=tuple(f"model.layers.{layer}." for layer in range(first, first + extra)))


def layers_by_kind(fields: Fields, default: Sequence[str]) -> list[bool]:
    """True for layers with experts, by `mlp_layer_types` or the default."""
    kinds, num_layers = fields.get("mlp_layer_types") or default, fields.number("num_hidden_layers")
    if set(kinds) - {DENSE, SPARSE} or len(kinds) != num_layers:
        raise UnsupportedModelError(f"config.json: mlp_layer_types = {kinds!r:.80} is not supported")
    return [kind == SPARSE for kind in kinds]


def behind_dense(fields: Fields) -> list[str]:
    """Kinds of layers of which the first `first_k_dense_replace` have no experts."""
    num_dense = fields.count("first_k_dense_replace")
    return [SPARSE if layer >= num_dense else DENSE for layer in range(fields.number("num_hidden_layers"))]


def sparse_layers(fields: Fields) -> list[bool]:
    """True for layers with experts: every `decoder_sparse_step`th one, except those in `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step") or 1, set(fields.get("mlp_only_layers") or ())
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(fields.number("num_hidden_layers"))]
