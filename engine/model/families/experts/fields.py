"""Fields about experts that several families share."""

from __future__ import annotations

from engine.kernels.experts.rule import RoutingRule, Score
from engine.model.experts import ExpertTensors, SharedExpertSpec, SparseMlpSpec
from engine.model.families.fields import Fields, flag, gated_mlp, number
from engine.model.spec import UnsupportedModelError

GATE_UP_DOWN = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ONE_EACH = ExpertTensors(each=GATE_UP_DOWN)


def softmax_rule(fields: Fields) -> RoutingRule:
    """The highest of softmax, made to add up to 1 if `norm_topk_prob`."""
    rule = RoutingRule(
        chosen=number(fields, "num_experts_per_tok"),
        score=Score.SOFTMAX,
        renormalised=flag(fields, "norm_topk_prob"),
    )
    return checked(fields, rule)


def num_experts_of(fields: Fields) -> int:
    """Experts of a layer, whichever name the release of transformers gave the field."""
    return number(fields, next((name for name in _NUM_EXPERTS if name in fields), _NUM_EXPERTS[0]))


def checked(fields: Fields, rule: RoutingRule) -> RoutingRule:
    """Return the rule. Raises UnsupportedModelError when it can't choose among so many experts."""
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
) -> SparseMlpSpec:
    gated_mlp(fields)  # experts have the activation of dense layers
    return SparseMlpSpec(
        num_experts=num_experts_of(fields),
        size=number(fields, size_field),
        rule=rule,
        tensors=tensors,
        shared=shared,
    )


def sparse_layers(fields: Fields) -> list[bool]:
    """Whether each layer has experts: every `decoder_sparse_step`th one, without those of `mlp_only_layers`."""
    step, dense = int(fields.get("decoder_sparse_step") or 1), set(fields.get("mlp_only_layers") or ())
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(number(fields, "num_hidden_layers"))]
