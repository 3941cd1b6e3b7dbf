"""HunYuan with experts (A13B): the dense model's attention; softmax routing, and a gated MLP for all tokens."""

from __future__ import annotations

from engine.kernels.experts.rule import RoutingRule
from engine.model.experts import ExpertTensors, SharedExpertSpec
from engine.model.families.dense import hunyuan
from engine.model.families.experts.fields import GATE_UP_DOWN, checked, sparse_mlp
from engine.model.families.fields import Fields, model, number
from engine.model.spec import LayerSpec, ModelSpec, UnsupportedModelError

# Of a list for each layer, all say the same; for what we don't compute that is nothing.
BY_LAYER = ("moe_topk", "num_experts", "moe_intermediate_size", "num_shared_expert")
TENSORS = ExpertTensors(router=("mlp.gate.wg",), each=GATE_UP_DOWN)
OF_TRAINING = ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "use_mixed_mlp_moe")


def read(fields: Fields) -> ModelSpec:
    alike = {name: _of_all_layers(fields, name) for name in BY_LAYER if isinstance(fields.get(name), list)}
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 1})
    if "num_experts_per_tok" not in fields:
        fields = fields.over({"moe_topk": 1})
    fields = fields.with_values(**alike).over(hunyuan.DEFAULTS)
    size = number(fields, "intermediate_size")
    fields.only("moe_intermediate_size", size)
    fields.only("num_shared_expert", 1)
    fields.only("moe_layer_num_skipped", 0)
    fields.only("routed_scaling_factor", 1.0)
    fields.only("norm_topk_prob", True)
    fields.ignore(*OF_TRAINING)
    chosen = number(fields, "moe_topk" if "moe_topk" in fields else "num_experts_per_tok")
    rule = checked(fields, RoutingRule(chosen=chosen, renormalised=True))
    shared = SharedExpertSpec(size=size, under="mlp.shared_mlp")
    mlp = sparse_mlp(fields, rule, size_field="intermediate_size", tensors=TENSORS, shared=shared)
    layer = LayerSpec(mixer=hunyuan.mixer(fields), mlp=mlp)
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def _of_all_layers(fields: Fields, name: str) -> int:
    values = fields[name]
    if not values or any(value != values[0] for value in values):
        raise UnsupportedModelError(
            f"config.json: {name} = {values!r:.80} differs between layers, which is not supported"
        )
    return int(values[0])
