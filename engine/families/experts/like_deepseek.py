"""DeepSeek-V3's experts behind other attention: dots.llm1, K-EXAONE, Trinity and Laguna."""

from __future__ import annotations

from dataclasses import replace

from engine.families.dense import exaone4
from engine.families.experts.fields import (
    CORRECTED,
    DENSE,
    GATE_UP_DOWN,
    SPARSE,
    behind_dense,
    checked,
    layers_by_kind,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
)
from engine.families.fields import (
    FULL,
    SLIDING,
    Fields,
    attention,
    count,
    every,
    flag,
    gated_mlp,
    layer_types,
    model,
    number,
    real,
    rope,
    sliding_window,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import AttentionSpec, OutputGate, QkNorm
from engine.spec.experts import ExpertTensors, SharedExpertSpec
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec, UnsupportedModelError
from engine.weights.names import StoredNames

DOTS_1 = {
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1408,
    "sliding_window": 4096,
    "max_window_layers": 62,
}
K_EXAONE = exaone4.DEFAULTS | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
ALSO_BESIDE = replace(CORRECTED, correction=(*CORRECTED.correction, "mlp.e_score_correction_bias"))
PREDICTIONS = StoredNames(ignored=("mtp.",))

AFMOE = {
    "vocab_size": 200192,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "num_dense_layers": 1,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "global_attn_every_n_layers": 4,
    "sliding_window": 1024,
}
LAGUNA = {
    "vocab_size": 100352,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "sliding_window": 512,
    "gating": True,
}
LAGUNA_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
PER_HEAD = "per-head"
MOST_HEADS = 1 << 16
IN_EXPERTS = replace(CORRECTED, correction=("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"))
AROUND_MIXER = BranchSpec(before="input_layernorm", after="post_attention_layernorm")
AROUND_MLP = BranchSpec(before="pre_mlp_layernorm", after="post_mlp_layernorm")
TENSORS = ExpertTensors(router=("mlp.router.gate",), each=GATE_UP_DOWN, correction=("mlp.expert_bias",))
ONE_GROUP = ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")


def read_dots(fields: Fields) -> ModelSpec:
    """dots.llm1: Qwen3's attention, DeepSeek-V3's experts."""
    fields = fields.over(DOTS_1)
    window, first = sliding_window(fields), number(fields, "max_window_layers")
    default = [SLIDING if window and layer >= first else FULL for layer in range(number(fields, "num_hidden_layers"))]
    bias, dense = flag(fields, "attention_bias"), gated_mlp(fields)
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=CORRECTED, shared=shared_experts(fields))
    layers = [
        LayerSpec(
            mixer=attention(
                fields, qkv_bias=bias, output_bias=bias, qk_norm=QkNorm(), window=window if kind == SLIDING else 0
            ),
            mlp=sparse if there else dense,
        )
        for kind, there in zip(layer_types(fields, default), layers_by_kind(fields, behind_dense(fields)), strict=True)
    ]
    return model(fields, layers)


def read_exaone(fields: Fields) -> ModelSpec:
    """K-EXAONE: EXAONE 4's attention, DeepSeek-V3's experts, norms before each half."""
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 64})
    fields = fields.over(K_EXAONE)
    fields.ignore("num_nextn_predict_layers", "mtp_loss_scaling_factor")
    dense, shared = gated_mlp(fields), shared_experts(fields, "num_shared_experts")
    sparse = sparse_mlp(fields, sigmoid_rule(fields), tensors=ALSO_BESIDE, shared=shared)
    default = [SPARSE if there else DENSE for there in fields.get("is_moe_layer") or ()] or behind_dense(fields)
    mixers, has_experts = exaone4.mixers(fields), layers_by_kind(fields, default)
    layers = [
        LayerSpec(mixer=mixer, mlp=sparse if there else dense) for mixer, there in zip(mixers, has_experts, strict=True)
    ]
    return model(fields, layers, stored=PREDICTIONS)


def read_trinity(fields: Fields) -> ModelSpec:
    """Trinity (Arcee): gated attention, with a rotation where it has a window; norms around both halves."""
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 64})
    fields = fields.over(AFMOE)
    fields.only("attention_bias", False)
    fields.only("score_func", "sigmoid")
    fields.only("route_norm", True)
    for name in ONE_GROUP:
        fields.only(name, 1)
    fields.ignore("load_balance_coeff", "use_grouped_mm")
    rule = RoutingRule(
        chosen=number(fields, "num_experts_per_tok"),
        score=Score.SIGMOID,
        renormalised=True,
        scale=real(fields, "route_scale", 1.0),
    )
    shared = shared_experts(fields, "num_shared_experts")
    dense, sparse = gated_mlp(fields), sparse_mlp(fields, checked(fields, rule), tensors=TENSORS, shared=shared)
    window, rotation, num_dense = sliding_window(fields), rope(fields), count(fields, "num_dense_layers")
    kinds = layer_types(fields, every(fields, number(fields, "global_attn_every_n_layers")))
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
    scale = number(fields, "hidden_size") ** 0.5 if flag(fields, "mup_enabled") else 1.0
    return model(fields, layers, embedding_multiplier=scale)


def read_laguna(fields: Fields) -> ModelSpec:
    """Laguna (Poolside): a softplus gate of each head's output; windows, rotations and heads by layer."""
    if "num_local_experts" not in fields:
        fields = fields.over({"num_experts": 256})
    fields = fields.over(LAGUNA)
    if not fields.get("rope_parameters"):
        fields = fields.with_values(rope_parameters=LAGUNA_ROPES)
    fields.only("norm_topk_prob", True)
    fields.only("decoder_sparse_step", 1)
    fields.only("qkv_bias", False)
    for name in ("moe_apply_router_weight_on_input", "swa_attention_sink_enabled"):
        fields.only(name, False)
    fields.only("moe_router_logit_softcapping", 0)
    rule = RoutingRule(
        chosen=number(fields, "num_experts_per_tok"),
        score=Score.SIGMOID,
        renormalised=True,
        scale=real(fields, "moe_routed_scaling_factor", 1.0),
    )
    shared = SharedExpertSpec(size=number(fields, "shared_expert_intermediate_size"), under="mlp.shared_expert")
    dense, sparse = gated_mlp(fields), sparse_mlp(fields, checked(fields, rule), tensors=IN_EXPERTS, shared=shared)
    num_layers = number(fields, "num_hidden_layers")
    kinds = layer_types(fields, [FULL] * num_layers)
    layers = [
        LayerSpec(mixer=mixer, mlp=sparse if there else dense)
        for mixer, there in zip(_laguna_mixers(fields, kinds), _behind_named(fields), strict=True)
    ]
    # Transformers has another name for the shared expert in memory.
    at = [f"model.layers.{layer}.mlp." for layer in range(num_layers)]
    names = StoredNames(renamed={f"{each}shared_experts.": f"{each}shared_expert." for each in at})
    return model(fields, layers, stored=names)


def _laguna_mixers(fields: Fields, kinds: list[str]) -> list[AttentionSpec]:
    gating, window = fields.get("gating"), sliding_window(fields)
    fields.only("attention_bias", False)
    fields.only("gating", True, PER_HEAD, "per-element")
    by_head = gating in (None, True, PER_HEAD)
    fields.only("gating_types", [PER_HEAD if by_head else "per-element"] * len(kinds))
    of_kind = {
        kind: attention(
            fields, rope=rope(fields, kind=kind), window=window if kind == SLIDING else 0, qk_norm=QkNorm(),
            gate=OutputGate(module="self_attn.g_proj", by_head=by_head, activation="softplus"),
        )
        for kind in set(kinds)
    }  # fmt: skip
    heads = fields.get("num_attention_heads_per_layer") or [number(fields, "num_attention_heads")] * len(kinds)
    kv_heads = number(fields, "num_key_value_heads")
    if len(heads) != len(kinds) or not all(type(each) is int and 0 < each <= MOST_HEADS for each in heads):
        raise UnsupportedModelError(
            f"config.json: num_attention_heads_per_layer = {heads!r:.80} must be a count for each of {len(kinds)} layers"
        )
    if wrong := [each for each in heads if each % kv_heads]:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads_per_layer = {wrong[0]} is no multiple of num_key_value_heads = {kv_heads}"
        )
    return [
        replace(of_kind[kind], heads=replace(of_kind[kind].heads, num_heads=each))
        for kind, each in zip(kinds, heads, strict=True)
    ]


def _behind_named(fields: Fields) -> list[bool]:
    """Whether each layer has experts: all but those of `mlp_only_layers`, which may say the same as `mlp_layer_types`."""
    named, num_layers = fields.get("mlp_only_layers"), number(fields, "num_hidden_layers")
    default = [DENSE if layer in ([0] if named is None else named) else SPARSE for layer in range(num_layers)]
    found = layers_by_kind(fields, default)
    if named is not None and found != [kind == SPARSE for kind in default]:
        raise UnsupportedModelError(f"config.json: mlp_only_layers = {named!r:.80} and mlp_layer_types differ")
    return found
