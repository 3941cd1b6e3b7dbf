"""Arcee: AFM (Arcee), Trinity."""

from __future__ import annotations

from engine.families.reading import (
    GATE_UP_DOWN,
    SLIDING,
    Family,
    Fields,
    attention,
    checked,
    every,
    gated_mlp,
    layer_types,
    model,
    rope,
    shared_experts,
    sliding_window,
    sparse_mlp,
    with_defaults,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import OutputGate, QkNorm
from engine.spec.ends import EmbeddingSpec
from engine.spec.experts import ExpertTensors
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, PlainMlpSpec

AROUND_MIXER = BranchSpec(before="input_layernorm", after="post_attention_layernorm")
AROUND_MLP = BranchSpec(before="pre_mlp_layernorm", after="post_mlp_layernorm")
TENSORS = ExpertTensors(router=("mlp.router.gate",), each=GATE_UP_DOWN, correction=("mlp.expert_bias",))
ONE_GROUP = ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")


def read_arcee(fields: Fields) -> ModelSpec:
    """Arcee: an MLP of relu² without a gate."""
    fields = with_defaults(fields, "arcee")
    fields.only("hidden_act", "relu2")
    bias = fields.flag("attention_bias")
    size = fields.number("intermediate_size")
    mlp = PlainMlpSpec(size=size, bias=fields.flag("mlp_bias"), activation="relu2")
    layer = LayerSpec(mixer=attention(fields, qkv_bias=bias, output_bias=bias), mlp=mlp)
    return model(fields, [layer] * fields.number("num_hidden_layers"))


def read_trinity(fields: Fields) -> ModelSpec:
    """Trinity (Arcee): gated attention, with a rotation where it has a window; norms around both halves."""
    fields = with_defaults(fields, "afmoe")
    fields.only("attention_bias", False)
    fields.only("score_func", "sigmoid")
    fields.only("route_norm", True)
    for name in ONE_GROUP:
        fields.only(name, 1)
    fields.ignore("load_balance_coeff", "use_grouped_mm")
    rule = RoutingRule(
        chosen=fields.number("num_experts_per_tok"),
        score=Score.SIGMOID,
        renormalised=True,
        scale=fields.real("route_scale", 1.0),
    )
    shared = shared_experts(fields, "num_shared_experts")
    dense, sparse = gated_mlp(fields), sparse_mlp(fields, checked(fields, rule), tensors=TENSORS, shared=shared)
    window, rotation, num_dense = sliding_window(fields), rope(fields), fields.count("num_dense_layers")
    kinds = layer_types(fields, every(fields, fields.number("global_attn_every_n_layers")))
    layers = [
        LayerSpec(
            mixer=attention(
                fields,
                rope=rotation if kind == SLIDING else None,
                window=window if kind == SLIDING else 0,
                qk_norm=QkNorm(),
                gate=OutputGate(module="self_attn.gate_proj"),
            ),
            mlp=sparse if index >= num_dense else dense,
            around_mixer=AROUND_MIXER,
            around_mlp=AROUND_MLP,
        )
        for index, kind in enumerate(kinds)
    ]
    scale = fields.number("hidden_size") ** 0.5 if fields.flag("mup_enabled") else 1.0
    return model(fields, layers, embedding=EmbeddingSpec(multiplier=scale))


FAMILIES: dict[str, Family] = {
    "ArceeForCausalLM": read_arcee,
    "AfmoeForCausalLM": read_trinity,
}
