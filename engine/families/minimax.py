"""MiniMax: M2."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import W1_W3_W2, Family, Fields, attention, checked, model, rope, sparse_mlp, with_defaults
from engine.kernels.experts.rule import RoutingRule, Score
from engine.spec.attention import QkNorm
from engine.spec.experts import ExpertTensors
from engine.spec.model import LayerSpec, ModelSpec

TENSORS = ExpertTensors(
    router=("block_sparse_moe.gate", "mlp.gate"),
    each=W1_W3_W2,
    correction=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
)


def read_minimax_m2(fields: Fields) -> ModelSpec:
    """MiniMax-M2: queries and keys normed over all heads, partly rotated; sigmoid routing with a correction, without groups."""
    fields = with_defaults(fields, "minimax_m2")
    fields.only("scoring_func", "sigmoid")
    fields.only("use_qk_norm", True)
    fields.only("qk_norm_type", "per_layer")
    fields.only("use_routing_bias", True)
    fields.only("shared_intermediate_size", 0)
    fields.only("attn_type_list", [1] * fields.number("num_hidden_layers"))
    fields.ignore(
        "mlp_intermediate_size", "num_mtp_modules", "mtp_transformer_layers", "use_mtp", "shared_moe_mode", "rotary_dim"
    )
    for name in [name for name in fields if name.startswith("layernorm_")]:
        fields.only(name, 1.0)
    rule = RoutingRule(chosen=fields.number("num_experts_per_tok"), score=Score.SIGMOID, renormalised=True)
    rotation = rope(fields, theta=5_000_000.0)
    mixer = attention(fields, rope=rotation, qk_norm=QkNorm(over="all"))
    if rotated := fields.get("rotary_dim"):
        mixer = replace(mixer, rope=replace(rotation, share=rotated / mixer.heads.head_dim))
    layer = LayerSpec(
        mixer=mixer,
        mlp=sparse_mlp(fields, checked(fields, rule), size_field="intermediate_size", tensors=TENSORS),
    )
    return model(fields, [layer] * fields.number("num_hidden_layers"))


FAMILIES: dict[str, Family] = {
    "MiniMaxM2ForCausalLM": read_minimax_m2,
}
