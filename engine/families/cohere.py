"""Cohere: Command R, R+, R7B and A, also with experts.

Attention and MLP read the same LayerNorm and add up; pairs are interleaved. From R7B on three layers of four have a window, and
the fourth has no rope.
"""

from __future__ import annotations

from engine.families.reading import (
    DENSE,
    SLIDING,
    Family,
    Fields,
    attention,
    behind_dense,
    checked,
    every,
    gated_mlp,
    layer_types,
    layers_by_kind,
    model,
    rope,
    sliding_window,
    sparse_mlp,
    with_defaults,
)
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import AttentionSpec, QkNorm
from engine.spec.ends import HeadSpec, NormSpec
from engine.spec.experts import SharedExpertSpec, SparseMlpSpec
from engine.spec.model import BranchSpec, LayerSpec, ModelSpec

SHARED = BranchSpec(shares=True)


def read_cohere(fields: Fields) -> ModelSpec:
    """Command R and R+: parallel halves, LayerNorm, interleaved pairs."""
    fields = with_defaults(fields, "cohere")
    normed = QkNorm(over="each") if fields.flag("use_qk_norm") else None
    layer = _layer(fields, _attention(fields, qk_norm=normed))
    return _model(fields, [layer] * fields.number("num_hidden_layers"))


def read_cohere2(fields: Fields) -> ModelSpec:
    """Command R7B, Command A: windows on three layers of four, no rope on the fourth."""
    fields = with_defaults(fields, "cohere2")
    fields.only("use_qk_norm", False)
    fields.only("order_of_interleaved_layers", "local_attn_first")
    fields.only("position_embedding_type", "rope_gptj")
    fields.only("rotary_pct", 1.0)
    fields.only("use_parallel_block", True)
    fields.only("use_parallel_embedding", False, True)
    fields.only("use_gated_activation", True)
    window, period = sliding_window(fields), fields.count("sliding_window_pattern") or 4
    fields.only("layer_switch", period)
    fields.only("use_embedding_sharing", fields.flag("tie_word_embeddings"))
    sliding, full = _attention(fields, window=window), _attention(fields, has_rope=not window)
    kinds = layer_types(fields, every(fields, period))
    return _model(fields, [_layer(fields, sliding if kind == SLIDING else full) for kind in kinds])


def _attention(
    fields: Fields, *, window: int = 0, has_rope: bool = True, qk_norm: QkNorm | None = None
) -> AttentionSpec:
    bias, rotation = fields.flag("attention_bias"), rope(fields, interleaved=True)
    rotation_here = rotation if has_rope else None
    return attention(fields, rope=rotation_here, window=window, qk_norm=qk_norm, qkv_bias=bias, output_bias=bias)


def _layer(fields: Fields, mixer: AttentionSpec) -> LayerSpec:
    return LayerSpec(mixer=mixer, mlp=gated_mlp(fields), around_mlp=SHARED)


def _model(fields: Fields, layers: list[LayerSpec]) -> ModelSpec:
    scale = fields.real("logit_scale", 0.0625)
    return model(fields, layers, eps="layer_norm_eps", norms=NormSpec(kind="layer"), head=HeadSpec(multiplier=scale))


def read_cohere2_moe(fields: Fields) -> ModelSpec:
    """Command A with experts: Cohere 2's attention, parallel halves; shared experts are added, or averaged with the others."""
    fields = with_defaults(fields, "cohere2_moe")
    window = sliding_window(fields)
    sparse, around_sparse = _experts(fields)
    prefix_size = (
        "prefix_dense_intermediate_size" if fields.count("prefix_dense_intermediate_size") else "intermediate_size"
    )
    dense, turns_in_prefix = (
        gated_mlp(fields, size=prefix_size),
        fields.number("prefix_dense_sliding_window_pattern") == 1,
    )
    sliding = _attention(fields, window=window, has_rope=window > 0)
    full = {has_rope: _attention(fields, has_rope=has_rope) for has_rope in (False, True)}
    kinds = layer_types(fields, _kinds(fields))
    layers = [
        LayerSpec(
            mixer=sliding if kind == SLIDING else full[turns_in_prefix and not there],
            mlp=sparse if there else dense,
            around_mlp=around_sparse if there else SHARED,
        )
        for kind, there in zip(kinds, layers_by_kind(fields, behind_dense(fields)), strict=True)
    ]
    is_rms = fields.get("rms_norm_eps") is not None
    fields.ignore("layer_norm_eps")
    return model(
        fields,
        layers,
        eps="rms_norm_eps" if is_rms else "layer_norm_eps",
        norms=NormSpec(kind="rms" if is_rms else "layer"),
        head=HeadSpec(multiplier=fields.real("logit_scale", 0.0625)),
    )


def _experts(fields: Fields) -> tuple[SparseMlpSpec, BranchSpec]:
    """The mixture, and how it adds to the stream."""
    fields.only("expert_selection_fn", "softmax", "sigmoid")
    fields.only("shared_expert_combination_strategy", "average", "sum")
    chosen, num_shared = fields.number("num_experts_per_tok"), fields.count("num_shared_experts")
    rule = RoutingRule(chosen=chosen, score=Score.SOFTMAX_OF_CHOSEN)
    if fields["expert_selection_fn"] == "sigmoid":
        rule = RoutingRule(chosen=chosen, score=Score.SIGMOID, renormalised=fields.flag("norm_topk_prob"))
    fields.ignore("norm_topk_prob")
    size = num_shared * fields.number("intermediate_size")
    shared = SharedExpertSpec(size=size, under="mlp.shared_experts") if num_shared else None
    averages = num_shared and fields["shared_expert_combination_strategy"] == "average"
    mlp = sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", shared=shared)
    return mlp, BranchSpec(shares=True, multiplier=0.5 if averages else 1.0)


def _kinds(fields: Fields) -> list[str]:
    """Kinds of layers; the pattern restarts after the dense layers."""
    num_dense = behind_dense(fields).count(DENSE)
    prefix, period = fields.number("prefix_dense_sliding_window_pattern"), fields.number("sliding_window_pattern")
    return every(fields, prefix)[:num_dense] + every(fields, period)[: fields.number("num_hidden_layers") - num_dense]


FAMILIES: dict[str, Family] = {
    "CohereForCausalLM": read_cohere,
    "Cohere2ForCausalLM": read_cohere2,
    "Cohere2MoeForCausalLM": read_cohere2_moe,
}
