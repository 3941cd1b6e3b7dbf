"""DeepSeek-V2 and V3 (R1), and GLM-4.7-Flash: latent attention; experts behind dense layers, with groups and shared ones."""

from __future__ import annotations

from collections.abc import Sequence

from engine.families.experts.fields import (
    CORRECTED,
    ONE_EACH,
    behind_dense,
    checked,
    layers_by_kind,
    shared_experts,
    sigmoid_rule,
    sparse_mlp,
    without_predictions,
)
from engine.families.fields import Fields, count, flag, gated_mlp, model, number, real
from engine.families.latents import latent_attention
from engine.kernels.experts.rule import GroupScore, RoutingRule
from engine.spec.experts import ExpertTensors
from engine.spec.latents import LatentAttentionSpec
from engine.spec.model import BEFORE_MLP, BranchSpec, LayerSpec, ModelSpec

COMMON = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "max_position_embeddings": 2048,
}
V2 = COMMON | {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1407,
}
V3 = COMMON | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}
GLM_4_7_FLASH = V3 | {
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}
YOUTU = COMMON | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "max_position_embeddings": 131072,
    "rope_interleave": True,
    "tie_word_embeddings": True,
}


def read_v2(fields: Fields) -> ModelSpec:
    """DeepSeek-V2: latent attention; softmax routing, within groups in the large model; shared experts."""
    if "num_experts" not in fields:
        fields = fields.over({"n_routed_experts": 64})
    fields = fields.over(V2)
    fields.only("topk_method", "greedy", "group_limited_greedy")
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)
    fields.only("mlp_bias", False)
    in_groups = fields.get("topk_method") == "group_limited_greedy"
    num_groups, groups_kept = count(fields, "n_group"), count(fields, "topk_group")
    rule = RoutingRule(
        chosen=number(fields, "num_experts_per_tok"),
        num_groups=int(num_groups or 1) if in_groups else 1,
        groups_kept=int(groups_kept or 1) if in_groups else 1,
        group_score=GroupScore.BEST,
        scale=real(fields, "routed_scaling_factor", 1.0),
    )
    return _model(fields, checked(fields, rule), ONE_EACH, interleaved=True)


def read_v3(fields: Fields) -> ModelSpec:
    """DeepSeek-V3 and R1: latent attention; sigmoid routing within groups, corrected; a shared expert."""
    if "num_local_experts" not in fields:
        fields = fields.over({"n_routed_experts": 256})
    fields = fields.over(V3)
    return _model(fields, sigmoid_rule(fields), CORRECTED, interleaved=flag(fields, "rope_interleave"))


def read_glm(fields: Fields) -> ModelSpec:
    """GLM-4.7-Flash: DeepSeek-V3's layers, smaller."""
    if "num_local_experts" not in fields:
        fields = fields.over({"n_routed_experts": 64})
    fields = fields.over(GLM_4_7_FLASH)
    return _model(fields, sigmoid_rule(fields), CORRECTED, interleaved=flag(fields, "rope_interleave"))


def read_youtu(fields: Fields) -> ModelSpec:
    """Youtu: DeepSeek's latent attention in a dense model."""
    fields = fields.over(YOUTU)
    fields.ignore("embedding_initializer_range")
    interleaved, value_dim = flag(fields, "rope_interleave"), number(fields, "v_head_dim")
    mixer = latent_attention(fields, interleaved=interleaved, value_dim=value_dim)
    layer = LayerSpec(mixer=mixer, mlp=gated_mlp(fields, bias=flag(fields, "mlp_bias")))
    return model(fields, [layer] * number(fields, "num_hidden_layers"))


def _model(fields: Fields, rule: RoutingRule, tensors: ExpertTensors, *, interleaved: bool) -> ModelSpec:
    mixer = latent_attention(fields, interleaved=interleaved, value_dim=number(fields, "v_head_dim"))
    return with_experts(fields, [mixer] * number(fields, "num_hidden_layers"), rule, tensors)


def with_experts(
    fields: Fields,
    mixers: Sequence[LatentAttentionSpec],
    rule: RoutingRule,
    tensors: ExpertTensors,
    *,
    around_experts: BranchSpec = BEFORE_MLP,
) -> ModelSpec:
    """Read a model of these mixers, one a layer, with experts behind dense layers."""
    fields.only("moe_layer_freq", 1)
    fields.only("ep_size", 1)
    fields.ignore("aux_loss_alpha", "seq_aux")
    stored, dense = without_predictions(fields), gated_mlp(fields)
    sparse = sparse_mlp(fields, rule, tensors=tensors, shared=shared_experts(fields))
    has_experts = layers_by_kind(fields, behind_dense(fields))
    layers = [
        LayerSpec(mixer=mixer, mlp=sparse, around_mlp=around_experts) if there else LayerSpec(mixer=mixer, mlp=dense)
        for mixer, there in zip(mixers, has_experts, strict=True)
    ]
    return model(fields, layers, stored=stored)
