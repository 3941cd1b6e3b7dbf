"""inclusionAI (Ant Group): Ling and Ring 2.0, whose code is not in transformers: GLM-4.5's layers by other names."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import (
    GATE_UP_DOWN,
    Family,
    Fields,
    attention,
    behind_dense,
    gated_mlp,
    layers_by_kind,
    model,
    sigmoid_rule,
    sparse_mlp,
    with_defaults,
    without_predictions,
)
from engine.spec.attention import QkNorm
from engine.spec.experts import ExpertTensors, SharedExpertSpec
from engine.spec.model import LayerSpec, ModelSpec
from engine.weights.names import StoredNames

TENSORS = ExpertTensors(each=GATE_UP_DOWN, all=(), correction=("mlp.gate.expert_bias",))
NAMES = StoredNames(renamed={"model.word_embeddings.": "model.embed_tokens."})
NORMS = QkNorm(q_name="attention.query_layernorm", k_name="attention.key_layernorm")


def read_ling(fields: Fields) -> ModelSpec:
    """Ling and Ring 2.0: half of each normed head rotated; corrected sigmoid routing in groups, and a shared expert."""
    fields = with_defaults(fields, "bailing_moe")
    for name in ("use_rmsnorm", "moe_router_enable_expert_bias", "norm_topk_prob"):
        fields.only(name, True)
    for name in ("use_bias", "use_qkv_bias", "norm_head", "use_sliding_window"):
        fields.only(name, False)
    fields.only("score_function", "sigmoid")
    fields.only("router_dtype", "fp32", "float32")
    fields.ignore("output_dropout", "max_window_layers", "sliding_window", "mtp_loss_scaling_factor")
    num_shared, size = fields.count("num_shared_experts"), fields.number("moe_intermediate_size")
    shared_size = fields.count("moe_shared_expert_intermediate_size") or size
    rule = replace(sigmoid_rule(fields), renormalised=True)
    shared = SharedExpertSpec(size=num_shared * shared_size, under="mlp.shared_experts") if num_shared else None
    dense, sparse = gated_mlp(fields), sparse_mlp(fields, rule, tensors=TENSORS, shared=shared)
    qk_norm = NORMS if fields.flag("use_qk_norm") else None
    mixer = attention(fields, fused="attention.query_key_value", output="attention.dense", qk_norm=qk_norm)
    has_experts = layers_by_kind(fields, behind_dense(fields))
    layers = [LayerSpec(mixer=mixer, mlp=sparse if there else dense) for there in has_experts]
    return model(fields, layers, stored=without_predictions(fields)).with_names(NAMES)


FAMILIES: dict[str, Family] = {
    "BailingMoeV2ForCausalLM": read_ling,
}
