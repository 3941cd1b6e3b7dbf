"""Baidu: ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from engine.families.reading import (
    GATE_UP_DOWN,
    Family,
    Fields,
    attention,
    checked,
    gated_mlp,
    model,
    num_experts_of,
    rope,
    sparse_mlp,
    with_defaults,
)
from engine.kernels.experts.rule import RoutingRule
from engine.spec.experts import ExpertTensors, SharedExpertSpec
from engine.spec.model import LayerSpec, ModelSpec
from engine.weights.names import StoredNames

NAMES = StoredNames(ignored=("model.mtp_",))  # they predict further tokens
STATICS = ("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias")


def read_ernie(fields: Fields) -> ModelSpec:
    """ERNIE 4.5 (dense): Llama with interleaved pairs."""
    fields = with_defaults(fields, "ernie4_5")
    bias = fields.flag("use_bias")
    mixer = attention(fields, rope=rope(fields, interleaved=True), qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=bias))
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def read_ernie_moe(fields: Fields) -> ModelSpec:
    """ERNIE 4.5 with experts: neighbours are rotated as pairs; softmax routing with a correction of the choice."""
    fields = with_defaults(fields, "ernie4_5_moe")
    fields.only("moe_use_aux_free", True)
    fields.only("moe_gate", "topk", "topk_fused")
    fields.only("use_bias", False)
    fields.only("use_rmsnorm", True)
    fields.ignore("moe_capacity", "moe_dropout_prob")
    size, num_experts = fields.number("moe_intermediate_size"), num_experts_of(fields)
    rule = RoutingRule(
        chosen=fields.number("moe_k"), renormalised=True, smallest_sum=fields.real("moe_norm_min", 1e-12)
    )
    tensors = ExpertTensors(each=GATE_UP_DOWN, correction=STATICS, correction_shape=(1, num_experts))
    num_shared = fields.count("moe_num_shared_experts")
    shared = SharedExpertSpec(size=num_shared * size, under="mlp.shared_experts") if num_shared else None
    mixer = attention(fields, rope=rope(fields, theta=500_000.0, interleaved=True))
    dense, sparse = (
        gated_mlp(fields),
        sparse_mlp(fields, checked(fields, rule), tensors=tensors, shared=shared),
    )
    layers = [LayerSpec(mixer=mixer, mlp=sparse if there else dense) for there in _sparse_layers(fields)]
    return model(fields, layers).with_names(NAMES)


def _sparse_layers(fields: Fields) -> list[bool]:
    num_layers, every = fields.number("num_hidden_layers"), fields.number("moe_layer_interval")
    first, last = fields.count("moe_layer_start_index"), int(fields["moe_layer_end_index"])
    last = num_layers - 1 if last == -1 else last
    return [first <= layer <= last and (layer + 1) % every == 0 for layer in range(num_layers)]


FAMILIES: dict[str, Family] = {
    "Ernie4_5ForCausalLM": read_ernie,
    "Ernie4_5_MoeForCausalLM": read_ernie_moe,
}
