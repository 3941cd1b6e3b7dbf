"""HunYuan with experts (A13B), and Hy3."""

from __future__ import annotations

from engine.families.dense import hunyuan
from engine.families.experts.fields import (
    GATE_UP_DOWN,
    behind_dense,
    checked,
    layers_by_kind,
    sparse_mlp,
    without_predictions,
)
from engine.families.fields import Fields, attention, count, flag, gated_mlp, model, number, real, rope
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import QkNorm
from engine.spec.experts import ExpertTensors, SharedExpertSpec
from engine.spec.model import LayerSpec, ModelSpec, UnsupportedModelError

# Fields that may be lists with one entry a layer: all entries must be equal, and those of what we don't compute absent.
BY_LAYER = ("moe_topk", "num_experts", "moe_intermediate_size", "num_shared_expert")
TENSORS = ExpertTensors(router=("mlp.gate.wg",), each=GATE_UP_DOWN)
TENSORS_3 = ExpertTensors(
    router=("mlp.router.gate", "mlp.gate"),
    each=GATE_UP_DOWN,
    correction=("mlp.expert_bias", "mlp.e_score_correction_bias"),
)
# Sums that its makers round later than we do, or as late.
IN_FLOAT32 = ("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine")
HY_3 = {
    "vocab_size": 120832,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "router_scaling_factor": 2.826,
}
OF_TRAINING = ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "use_mixed_mlp_moe")


def read(fields: Fields) -> ModelSpec:
    """HunYuan with experts (A13B): the dense model's attention; softmax routing, and a gated MLP for all tokens."""
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


def read_3(fields: Fields) -> ModelSpec:
    """Hy3 (Tencent): heads normed before the rotation; corrected sigmoid routing behind a dense layer, and a shared expert."""
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 192})
    fields = fields.over(HY_3)
    for name in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        fields.only(name, True)
    fields.only("mlp_bias", False)
    size = number(fields, "moe_intermediate_size")
    fields.only("expert_hidden_dim", size)
    fields.ignore(*IN_FLOAT32, "use_grouped_mm")
    rule = RoutingRule(
        chosen=number(fields, "num_experts_per_tok"),
        score=Score.SIGMOID,
        renormalised=True,
        scale=real(fields, "router_scaling_factor", 1.0),
    )
    num_shared, bias = count(fields, "num_shared_experts"), flag(fields, "attention_bias")
    shared = SharedExpertSpec(size=num_shared * size, under="mlp.shared_mlp") if num_shared else None
    dense, sparse = gated_mlp(fields), sparse_mlp(fields, checked(fields, rule), tensors=TENSORS_3, shared=shared)
    rotation = rope(fields, theta=11_158_840.0)
    mixer = attention(fields, rope=rotation, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm())
    has_experts = layers_by_kind(fields, behind_dense(fields))
    layers = [LayerSpec(mixer=mixer, mlp=sparse if there else dense) for there in has_experts]
    return model(fields, layers, stored=without_predictions(fields))


def _of_all_layers(fields: Fields, name: str) -> int:
    values = fields[name]
    if not values or any(value != values[0] for value in values):
        raise UnsupportedModelError(
            f"config.json: {name} = {values!r:.80} differs between layers, which is not supported"
        )
    return int(values[0])
