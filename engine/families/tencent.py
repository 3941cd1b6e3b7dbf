"""Tencent: HunYuan, dense and with experts, Hy3, Youtu."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import (
    GATE_UP_DOWN,
    Family,
    Fields,
    attention,
    behind_dense,
    checked,
    gated_mlp,
    layers_by_kind,
    mla_attention,
    model,
    rope,
    rope_values,
    sparse_mlp,
    with_defaults,
    without_predictions,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.experts import ExpertTensors, SharedExpertSpec
from engine.spec.model import LayerSpec, ModelSpec, UnsupportedModelError

_IMAGES = ("start", "end", "newline")
QK_NORM = QkNorm(after_rope=True, q_name="self_attn.query_layernorm", k_name="self_attn.key_layernorm")
# Fields that may be lists with one entry a layer: all must be equal, and unsupported ones absent.
BY_LAYER = ("moe_topk", "num_experts", "moe_intermediate_size", "num_shared_expert")
TENSORS = ExpertTensors(router=("mlp.gate.wg",), each=GATE_UP_DOWN)
TENSORS_3 = ExpertTensors(
    router=("mlp.router.gate", "mlp.gate"),
    each=GATE_UP_DOWN,
    correction=("mlp.expert_bias", "mlp.e_score_correction_bias"),
)
# Fields of the accumulation dtype, which rounds no earlier than ours.
IN_FLOAT32 = ("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine")
OF_TRAINING = ("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "use_mixed_mlp_moe")


def read_hunyuan(fields: Fields) -> ModelSpec:
    """HunYuan (dense): queries and keys are normed after the rotation, whose base grows by `alpha`."""
    fields = with_defaults(fields, "hunyuan_v1_dense")
    fields.only("num_experts", 1)
    fields.only("routed_scaling_factor", 1.0)
    layer = LayerSpec(mixer=_mixer(fields), mlp=gated_mlp(fields))
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def _mixer(fields: Fields) -> AttentionSpec:
    """Every layer's attention."""
    fields.ignore("org_vocab_size", "cla_share_factor", "enable_lm_head_fp32", "class_num", "dense_list", "pool_type")
    fields.ignore("pad_id", "mask_init_id", "text_start_id", "text_end_id", *(f"im_{name}_id" for name in _IMAGES))
    fields.only("norm_type", "rms", "hf_rms")
    fields.only("use_rotary_pos_emb", True)
    fields.only("attention_head_dim", fields.get("head_dim"))
    fields.only("use_qk_norm", True)
    fields.only("use_cla", False)
    bias, others = fields.flag("attention_bias"), ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    found = attention(fields, rope=rope(fields, others=others), qk_norm=QK_NORM, qkv_bias=bias, output_bias=bias)
    _, values = rope_values(fields)
    if found.rope is not None and (values.get("rope_type") or values.get("type")) == "dynamic" and values.get("alpha"):
        dim = found.heads.head_dim
        theta = found.rope.theta * float(values["alpha"]) ** (dim / (dim - 2))
        found = replace(found, rope=replace(found.rope, theta=theta))
    return found


def read_hunyuan_moe(fields: Fields) -> ModelSpec:
    """HunYuan with experts (A13B): the dense model's attention; softmax routing, and a gated MLP for all tokens."""
    alike = {name: _of_all_layers(fields, name) for name in BY_LAYER if isinstance(fields.get(name), list)}
    if "num_experts_per_tok" not in fields:
        fields = fields.over({"moe_topk": 1})
    fields = with_defaults(fields.with_values(**alike), "hunyuan_v1_moe")
    size = fields.number("intermediate_size")
    fields.only("moe_intermediate_size", size)
    fields.only("num_shared_expert", 1)
    fields.only("moe_layer_num_skipped", 0)
    fields.only("routed_scaling_factor", 1.0)
    fields.only("norm_topk_prob", True)
    fields.ignore(*OF_TRAINING)
    chosen = fields.number("moe_topk" if "moe_topk" in fields else "num_experts_per_tok")
    rule = checked(fields, RoutingRule(chosen=chosen, renormalised=True))
    shared = SharedExpertSpec(size=size, under="mlp.shared_mlp")
    mlp = sparse_mlp(fields, rule, size_field="intermediate_size", tensors=TENSORS, shared=shared)
    layer = LayerSpec(mixer=_mixer(fields), mlp=mlp)
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def read_hy3(fields: Fields) -> ModelSpec:
    """Hy3 (Tencent): heads normed before the rotation; corrected sigmoid routing behind a dense layer, and a shared expert."""
    fields = with_defaults(fields, "hy_v3")
    for name in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        fields.only(name, True)
    fields.only("mlp_bias", False)
    size = fields.number("moe_intermediate_size")
    fields.only("expert_hidden_dim", size)
    fields.ignore(*IN_FLOAT32, "use_grouped_mm")
    rule = RoutingRule(
        chosen=fields.number("num_experts_per_tok"),
        score=Score.SIGMOID,
        renormalised=True,
        scale=fields.real("router_scaling_factor", 1.0),
    )
    num_shared, bias = fields.count("num_shared_experts"), fields.flag("attention_bias")
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


def read_youtu(fields: Fields) -> ModelSpec:
    """Youtu: DeepSeek's latent attention in a dense model."""
    fields = with_defaults(fields, "youtu")
    fields.ignore("embedding_initializer_range")
    interleaved, value_dim = fields.flag("rope_interleave"), fields.number("v_head_dim")
    mixer = mla_attention(fields, interleaved=interleaved, value_dim=value_dim)
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=fields.flag("mlp_bias")))
    return model(fields, [layer] * fields.number("num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "HunYuanDenseV1ForCausalLM": read_hunyuan,
    "HunYuanMoEV1ForCausalLM": read_hunyuan_moe,
    "HYV3ForCausalLM": read_hy3,
    "YoutuForCausalLM": read_youtu,
}
